// Uses OpenAI's client for Node: a file, a job to its end, its events, a streamed answer of its model and a webhook.
// Arguments: base URL, key, folder of node_modules, training file, native fields of the job as JSON.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createReadStream, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { text } from "node:stream/consumers";
import { setTimeout as pause } from "node:timers/promises";

const [baseURL, apiKey, modules, path, native] = process.argv.slice(2);
const { OpenAI } = createRequire(`${modules}/`)("openai");
const client = new OpenAI({ baseURL, apiKey });

const messages = [];
const receiver = createServer(async (request, response) => {
  messages.push({ body: await text(request), headers: request.headers });
  response.end();
}).listen(0, "127.0.0.1");
await once(receiver, "listening");

const file = await client.files.create({ file: createReadStream(path), purpose: "fine-tune" });
assert.equal(await (await client.files.content(file.id)).text(), readFileSync(path, "utf8"));
const webhook = await client.webhooks.create({
  name: "node",
  url: `http://127.0.0.1:${receiver.address().port}/node`,
  event_types: ["fine_tuning.job.succeeded"],
});

const metadata = { team: "node" };
const created = await client.fineTuning.jobs.create({
  model: "tiny",
  training_file: file.id,
  metadata,
  anneal: JSON.parse(native),
});
const listed = [];
for await (const job of client.fineTuning.jobs.list({ metadata })) listed.push(job.id);
assert.deepEqual(listed, [created.id]);

let job = created;
while (!["succeeded", "failed", "cancelled"].includes(job.status)) {
  await pause(200);
  job = await client.fineTuning.jobs.retrieve(created.id);
}
assert.equal(job.status, "succeeded", JSON.stringify(job.error));
const events = [];
for await (const event of client.fineTuning.jobs.listEvents(job.id, { limit: 3 })) events.push(event.message);
assert.equal(events[0], "The job has succeeded.");
assert.equal(events.at(-1), "The job is queued.");
assert.ok((await client.fineTuning.jobs.checkpoints.list(job.id)).data.length > 0);

const stream = await client.chat.completions.create({
  model: job.fine_tuned_model,
  messages: [{ role: "user", content: "what is row 7" }],
  temperature: 0,
  max_tokens: 8,
  stream: true,
  stream_options: { include_usage: true },
});
let answer = "";
let usage = null;
for await (const chunk of stream) {
  answer += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.ok(answer.length > 0 && usage.completion_tokens > 0, JSON.stringify({ answer, usage }));

while (messages.length === 0) await pause(200);
const [{ body, headers }] = messages;
const event = await client.webhooks.unwrap(body, headers, webhook.signing_secret);
assert.deepEqual([event.type, event.data.id], ["fine_tuning.job.succeeded", job.id]);
await assert.rejects(client.webhooks.verifySignature(`${body} `, headers, webhook.signing_secret));
await client.webhooks.delete(webhook.id);
await assert.rejects(client.fineTuning.jobs.retrieve("ftjob-none"), OpenAI.NotFoundError);

receiver.closeAllConnections();
receiver.close();
console.log(JSON.stringify({ model: job.fine_tuned_model, answer }));
