"""The API that OpenAI's clients speak."""
