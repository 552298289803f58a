"""Images and videos of prompts: fetched, decoded, processed, and handed to the engine."""
