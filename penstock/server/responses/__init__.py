"""OpenAI's Responses API: stored responses, conversations, and calls to tool servers."""
