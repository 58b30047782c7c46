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

  // Yields { remark } for the server's notices while the request waits, and { piece } for each object of the stream. Throws Failure.
  async *chat(asked, signal) {
    const response = await this.#ask("v1/chat/completions", { ...asked, stream: true }, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Failure("the connection closed before the answer was complete");
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith(":")) yield { remark: line.slice(1).trim() };
        if (!line.startsWith("data:")) continue;
        const data = line.slice("data:".length).trim();
        if (data === "[DONE]") return;
        const piece = JSON.parse(data);
        if (piece.error) throw new Failure(said(piece), piece.error.code);
        yield { piece };
      }
    }
  }

  async #json(path, asked) {
    return (await this.#ask(path, asked)).json();
  }

  async #ask(path, asked, signal) {
    const headers = asked === undefined ? {} : { "content-type": "application/json" };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const method = asked === undefined ? "GET" : "POST";
    let response;
    try {
      response = await fetch(path, { method, headers, body: asked && JSON.stringify(asked), signal, credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("the server does not answer: is effllm serve still running?");
    }
    if (response.ok) return response;
    const problem = await response.json().catch(() => null);
    throw new Failure(said(problem) ?? `the server answers ${response.status}`, response.status);
  }
}

// The one-line message of an error, in whichever form an API has it.
function said(problem) {
  return typeof problem?.error === "string" ? problem.error : problem?.error?.message;
}
