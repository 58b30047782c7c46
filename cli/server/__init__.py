"""The HTTP server: requests in the formats of OpenAI's, Anthropic's, Google's, Ollama's, LM Studio's and llama.cpp's APIs, answered by one
model, or by several behind a router."""
