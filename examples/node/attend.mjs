// Uses the service for many attentions at once, and for the steps of a decoder: node attend.mjs [ADDRESS]

import { array, CallError, Client, tensor } from "./attnserve.mjs";

const HEADS = 2;
const WIDTH = 16;
const client = new Client(process.argv[2] ?? "127.0.0.1:8001");

function random(length) {
  const numbers = Float32Array.from({ length: HEADS * length * WIDTH }, () => Math.random() - 0.5);
  return tensor(numbers, [HEADS, length, WIDTH]);
}

// softmax(q k / sqrt(d)) v for each head, by its definition, with each query attending to the keys up to its own.
function computedHere(query, key, value) {
  const [q, k, v] = [query, key, value].map(array);
  const [queries, keys] = [query.shape[1], key.shape[1]];
  const output = new Float64Array(q.length);
  for (let head = 0; head < HEADS; head++) {
    for (let i = 0; i < queries; i++) {
      const row = (head * queries + i) * WIDTH;
      const weights = Array.from({ length: i + 1 + keys - queries }, (_, j) => {
        let score = 0;
        for (let d = 0; d < WIDTH; d++) score += q[row + d] * k[(head * keys + j) * WIDTH + d];
        return Math.exp(score / Math.sqrt(WIDTH));
      });
      const sum = weights.reduce((a, b) => a + b);
      weights.forEach((weight, j) => {
        for (let d = 0; d < WIDTH; d++) output[row + d] += (weight / sum) * v[(head * keys + j) * WIDTH + d];
      });
    }
  }
  return output;
}

function difference(found, expected) {
  return found.reduce((most, each, i) => Math.max(most, Math.abs(each - expected[i])), 0);
}

const { version, device } = await client.info().catch((error) => {
  console.error(`attend: ${error.message}`);
  process.exit(1);
});
console.log(`attnserve ${version} on ${device}`);

// A hundred calls on one stream: they are sent together, and run together.
const requests = Array.from({ length: 100 }, (_, n) => {
  const length = 1 + (n % 24);
  return { query: random(length), key: random(length), value: random(length), causal: true };
});
const replies = await Promise.all(requests.map((request) => client.attend(request)));
const worst = replies.map(({ output }, n) => {
  const { query, key, value } = requests[n];
  return difference(array(output), computedHere(query, key, value));
});
console.log(`100 on a stream, at most ${Math.max(...replies.map((reply) => reply.batch_size))} together`);
console.log(`difference from the definition: ${Math.max(...worst).toExponential(1)}`);

// Keys and values are sent once; each decoder step sends its own and attends to all.
const cache = await client.createCache({ num_kv_heads: HEADS, head_dim: WIDTH, dtype: "DATA_TYPE_FLOAT32" });
const [key, value] = [random(500), random(500)];
let length = await client.append({ name: cache.name, expected_length: 0, key, value });
for (let step = 0; step < 10; step++) {
  const caches = [{ name: cache.name, expected_length: length }];
  const reply = await client.attend({ query: random(1), key: random(1), value: random(1), causal: true, caches });
  [length] = reply.cache_lengths;
}
console.log(`a cache of ${length} tokens, after 10 steps`);

// An invalid request gets an error with the wrong field; a second attempt at an append, one with the cache's length.
for (const wrong of [
  { query: random(3), key: random(4), value: random(5) },
  { query: random(1), key: random(1), value: random(1), caches: [{ name: cache.name, expected_length: 500 }] },
]) {
  const error = await client.attend(wrong).catch((error) => error);
  if (!(error instanceof CallError)) throw error;
  console.log(`${error.reason}: ${error.message}`);
}

await client.deleteCaches(cache.name);
await client.close();
