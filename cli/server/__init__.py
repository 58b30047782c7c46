"""Programs as readers: HTTP in the place of a terminal. Requests of OpenAI's, Anthropic's and Ollama's APIs in, answers of one model out,
one after the other or several at once."""
