"""OpenAI's Responses API: answers that are kept, conversations that go on, tools that run here."""
