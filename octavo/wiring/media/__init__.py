"""Media in prompts: their readers in the frontend, and the towers of the worker."""
