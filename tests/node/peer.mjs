// What tests have the example's client do: a line of JSON in, one out, in any order. node peer.mjs ADDRESS [CA TOKEN]
//
// In: {"id", "alone", "request"}, requests as protobuf has them in JSON. Out: {"id", "reply"}, or {"id", "error"}. When
// there is no more, the client ends in good order.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { CallError, Client } from "../../examples/node/attnserve.mjs";

const [address, authority, token] = process.argv.slice(2);
const client = new Client(address, { rootCertificate: authority && readFileSync(authority), token });
const asked = [];

// Bytes in base64, as protobuf has them.
function inJson(_, value) {
  return value?.type === "Buffer" ? Buffer.from(value.data).toString("base64") : value;
}

async function ask({ id, alone, request }) {
  const answer = { id };
  try {
    answer.reply = await (alone ? client.attendAlone(request) : client.attend(request));
  } catch (error) {
    if (!(error instanceof CallError)) throw error;
    const { code, message, reason, field, requestId } = error;
    answer.error = { code, message, reason, field, requestId };
  }
  process.stdout.write(`${JSON.stringify(answer, inJson)}\n`);
}

for await (const line of createInterface({ input: process.stdin })) asked.push(ask(JSON.parse(line)));
await Promise.all(asked);
await client.close();
