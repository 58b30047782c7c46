"""Programs as readers: HTTP in the place of a terminal. Requests of OpenAI's and Anthropic's APIs in, answers of one model out,
one after the other or several at once."""
