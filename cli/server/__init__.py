"""Programs as readers: HTTP in the place of a terminal. Requests of OpenAI's API in, answers of one engine out, one after the other."""
