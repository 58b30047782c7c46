"""Messages as a model reads them: chat templates, and the sandbox that they run in."""
