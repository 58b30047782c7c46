// The page's requests to its server: OpenAI's streamed chat completions, the list of models, and each one's capabilities.

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Api {
  constructor(key = "") {
    this.key = key;
  }

  async models() {
    return (await this.#json("v1/models")).data;
  }

  // "vision", "thinking" and their like. From headers alone: no model is loaded for it.
  async capabilities(model) {
    return (await this.#json("api/show", { model })).capabilities ?? [];
  }

  // Yields { notice } for the server's comments while the request waits, and { chunk } for each object of the stream. Throws Failure.
  async *chat(payload, signal) {
    const response = await this.#request("v1/chat/completions", { ...payload, stream: true }, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Failure("the connection closed before the answer was complete");
      buffer += value;
      const lines = buffer.split("\n");
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith(":")) yield { notice: line.slice(1).trim() };
        if (!line.startsWith("data:")) continue;
        const data = line.slice("data:".length).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Failure(messageOf(chunk), chunk.error.code);
        yield { chunk };
      }
    }
  }

  async #json(path, payload) {
    return (await this.#request(path, payload)).json();
  }

  async #request(path, payload, signal) {
    const headers = payload === undefined ? {} : { "content-type": "application/json" };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const method = payload === undefined ? "GET" : "POST";
    let response;
    try {
      response = await fetch(path, { method, headers, body: payload && JSON.stringify(payload), signal, credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("the server does not answer: is effllm serve still running?");
    }
    if (response.ok) return response;
    const problem = await response.json().catch(() => null);
    throw new Failure(messageOf(problem) ?? `the server answers ${response.status}`, response.status);
  }
}

// The message of an error response, in the format of any API.
function messageOf(problem) {
  return typeof problem?.error === "string" ? problem.error : problem?.error?.message;
}
