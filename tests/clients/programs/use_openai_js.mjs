// The openai client in JavaScript.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
};

const cases = {
  async models() {
    const found = [];
    for await (const entry of client.models.list()) found.push(entry.id);
    return found;
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_completion_tokens: 20 });
    return [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens];
  },
  async stream() {
    let text = "", usage = null, chunks = 0;
    const stream = await client.chat.completions.create({
      model, messages, temperature: 0, max_tokens: 20, stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) {
      chunks += 1;
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return [text, usage.completion_tokens, chunks];
  },
  async aborted() {
    // Whoever leaves early gets no error of the server's.
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 2000, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
    return "left";
  },
  async refused() {
    try {
      await client.chat.completions.create({ model, messages, temperature: -1 });
    } catch (error) {
      return [error.constructor.name, error.status, error.code];
    }
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model, input: ["The sea is blue.", "The sea is blue."] });
    const [first, same] = answer.data.map((entry) => entry.embedding);
    return first.reduce((sum, value, place) => sum + value * same[place], 0);
  },
  async schema() {
    const schema = {
      type: "object", additionalProperties: false, required: ["name", "people"],
      properties: { name: { type: "string", maxLength: 20 }, people: { type: "integer", minimum: 0, maximum: 1e8 } },
    };
    const answer = await client.chat.completions.create({
      model, messages: [{ role: "user", content: "Tell me of Paris: its name and how many people live there." }],
      max_tokens: 100, response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } },
    });
    return JSON.parse(answer.choices[0].message.content);
  },
  async required_tool() {
    const stream = client.chat.completions.stream({
      model, messages: [{ role: "user", content: "What is the weather in Paris in celsius?" }],
      tools: [weather], tool_choice: "required", max_tokens: 100,
    });
    const answer = await stream.finalChatCompletion();
    const call = answer.choices[0].message.tool_calls[0];
    return [call.function.name, call.function.arguments, answer.choices[0].finish_reason];
  },
};

const found = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    found[name] = { result: await run() };
  } catch (error) {
    found[name] = { error: String(error.stack ?? error) };
  }
}
console.log(JSON.stringify(found));
