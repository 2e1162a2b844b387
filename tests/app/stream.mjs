// Reads a run's stream with the common EventSource of Node, and prints the id of every event.
import { createRequire } from "node:module";

const [url, key, modules] = process.argv.slice(2);
const { EventSource } = createRequire(modules + "/")("eventsource");
const types = ["status", "log", "metric", "eval", "checkpoint", "config", "progress", "sample", "end"];
const source = new EventSource(url, {
  fetch: (input, init) => fetch(input, { ...init, headers: { ...init.headers, Authorization: `Bearer ${key}` } }),
});
for (const type of types) {
  source.addEventListener(type, (event) => {
    JSON.parse(event.data);
    console.log(event.lastEventId);
  });
}
// It comes back by itself after the server has closed, and is told by 204 that there is nothing more.
source.addEventListener("error", (event) => {
  if (source.readyState === EventSource.CLOSED) {
    console.log(`closed ${event.code}`);
  }
});
