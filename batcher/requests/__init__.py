"""JSONL lines to requests and results to lines: parsing, the rules, and OpenAI bodies."""
