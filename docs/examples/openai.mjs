// Chats with a cluster by OpenAI's own package: a stream, then JSON of a schema.
//   npm install && node openai.mjs [http://127.0.0.1:8000]
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2] ?? "http://127.0.0.1:8000"}/v1`, apiKey: process.env.TANDEM_API_KEY ?? "none" });
const [{ id: model }] = (await client.models.list()).data;
const messages = [{ role: "user", content: "Tell me about Noah." }];

const stream = await client.chat.completions.create({ model, messages, max_tokens: 32, stream: true });
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();

const schema = {
  type: "object",
  properties: { kind: { enum: ["boat", "tower"] }, large: { type: "boolean" } },
  required: ["kind", "large"],
  additionalProperties: false,
};
const answer = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 400,
  response_format: { type: "json_schema", json_schema: { name: "thing", strict: true, schema } },
});
console.log(JSON.parse(answer.choices[0].message.content));
