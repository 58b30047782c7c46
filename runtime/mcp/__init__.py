"""Model Context Protocol: clients for tool servers, and the agent loop in which a model calls their tools."""
