"""A server of OpenAI's API over one engine: HTTP on an event loop, steps in a thread."""
