// A client of the service from its protocol alone: many calls on one stream, resident caches, errors with details.
//
// In: the descriptor set that `make descriptors` writes, an address, requests as in the protos. Out: promises.
// Not here, but in the SDK for Python: several servers, retries, traces.

import { readFileSync } from "node:fs";
import { credentials, loadPackageDefinition, Metadata, status } from "@grpc/grpc-js";
import { loadFileDescriptorSetFromBuffer } from "@grpc/proto-loader";

const DESCRIPTORS = new URL("../../build/attnserve.binpb", import.meta.url);
const TYPES = loadFileDescriptorSetFromBuffer(readFileSync(DESCRIPTORS), {
  enums: String,
  longs: Number, // lengths and ids stay below 2 ** 53
  oneofs: true,
});
const { AttentionService, CacheService } = loadPackageDefinition(TYPES).attnserve.v1;

const MAX_REPLY_BYTES = 256 * 1024 * 1024; // gRPC's own limit is 4 MiB
const MAX_MESSAGE_BYTES = 1024 * 1024; // of calls that travel together
const MAX_MESSAGE_CALLS = 64; // every server accepts that many (Limits.max_message_calls)

const ARRAYS = {
  DATA_TYPE_FLOAT32: Float32Array,
  DATA_TYPE_FLOAT64: Float64Array,
  DATA_TYPE_INT64: BigInt64Array,
  DATA_TYPE_BOOL: Uint8Array,
};

// The error of a call. `code` is gRPC's, `reason` is the server's and never changes; `field` is the field that is
// wrong, `retryDelay` is in how many seconds there should be room, and `requestId` where the server's log says more.
export class CallError extends Error {
  constructor({ code, message, details }) {
    super(message);
    this.code = code;
    for (const { type_url: type, value } of details ?? []) {
      const name = type.split("/").pop();
      const detail = TYPES[name]?.deserialize(value);
      if (name === "google.rpc.ErrorInfo") {
        this.reason = detail.reason;
        this.metadata = detail.metadata;
      } else if (name === "google.rpc.BadRequest") {
        this.field = detail.field_violations[0].field;
      } else if (name === "google.rpc.RetryInfo") {
        this.retryDelay = seconds(detail.retry_delay);
      } else if (name === "google.rpc.RequestInfo") {
        this.requestId = detail.request_id;
      }
    }
  }
}

// A tensor of the protocol: an array of numbers, in C order, and the length of each axis.
export function tensor(array, shape) {
  const dtype = Object.keys(ARRAYS).find((name) => array instanceof ARRAYS[name]);
  return { dtype, shape, data: Buffer.from(array.buffer, array.byteOffset, array.byteLength) };
}

// The array of numbers of a tensor, copied: received data may not be aligned.
export function array({ dtype, data }) {
  return new ARRAYS[dtype](data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength));
}

// A server. A token takes a certificate along with it: without TLS, anybody on the way could read it.
export class Client {
  #attention;
  #caches;
  #metadata;
  #stream = null;
  #streams = new Set(); // including old ones with replies outstanding

  constructor(address, { token, rootCertificate } = {}) {
    if (token && !rootCertificate) throw new TypeError("token: expected rootCertificate too, since tokens go over TLS");
    const channelCredentials = rootCertificate ? credentials.createSsl(rootCertificate) : credentials.createInsecure();
    const options = { "grpc.max_receive_message_length": MAX_REPLY_BYTES, "grpc.max_send_message_length": -1 };
    this.#attention = new AttentionService(address, channelCredentials, options);
    this.#caches = new CacheService(address, channelCredentials, options);
    this.#metadata = new Metadata();
    if (token) this.#metadata.set("authorization", `Bearer ${token}`);
  }

  info() {
    return this.#unary(this.#attention, "serverInfo", {});
  }

  // One attention, as an RPC of its own. `timeout` is in seconds.
  attendAlone(request, timeout = 60) {
    return this.#unary(this.#attention, "attend", request, timeout);
  }

  // One attention among many, on the stream that they all share. This is the fast way.
  async attend(request, timeout = 60) {
    if (!this.#stream?.open) {
      const stream = new Stream(this.#attention.attendStream(this.#metadata));
      this.#streams.add(stream);
      stream.ended.then(() => this.#streams.delete(stream));
      this.#stream = stream;
    }
    return this.#stream.call({ timeout: duration(timeout), attend: request });
  }

  // Keys and values that stay on the server: num_kv_heads, head_dim, dtype.
  async createCache(request) {
    return (await this.#unary(this.#caches, "create", request)).cache;
  }

  // Appends to a cache, and returns how many tokens it has then. With `expected_length` and a unique `append_id`, a
  // second attempt is recognised.
  async append(request) {
    return (await this.#unary(this.#caches, "append", request)).length;
  }

  async deleteCaches(...names) {
    await this.#unary(this.#caches, "delete", { names });
  }

  // Ends the streams, once everything has been answered, and the connection.
  async close() {
    await Promise.all([...this.#streams].map((stream) => stream.end()));
    this.#attention.close();
    this.#caches.close();
  }

  #unary(stub, method, request, timeout = 60) {
    return new Promise((resolve, reject) => {
      const options = { deadline: Date.now() + timeout * 1000 };
      stub[method](request, this.#metadata, options, (error, reply) => (error ? reject(callError(error)) : resolve(reply)));
    });
  }
}

// Calls on one stream, any number in flight: each has a number, replies come in any order.
class Stream {
  open = true;
  ended; // resolves when nothing more comes
  #rpc;
  #waiting = new Map();
  #unsent = [];
  #writing = false;
  #numbers = 0;

  constructor(rpc) {
    this.#rpc = rpc;
    this.ended = new Promise((resolve) => {
      rpc.on("data", (message) => this.#read(message));
      rpc.on("error", (error) => this.#end(callError(error), resolve));
      rpc.on("end", () => this.#end(new CallError({ code: status.UNAVAILABLE, message: "the stream has ended" }), resolve));
    });
  }

  call(call) {
    return new Promise((resolve, reject) => {
      const id = ++this.#numbers;
      this.#unsent.push({ bytes: sizeOf(call.attend), call: { id, ...call } });
      this.#waiting.set(id, { resolve, reject });
      this.#write();
    });
  }

  // Half-closes it, and waits for all outstanding replies.
  end() {
    this.open = false;
    this.#write();
    return this.ended;
  }

  // Calls that are ready when the last message has been written go into the next; no message waits to be filled.
  #write() {
    if (this.#writing) return;
    this.#writing = true;
    setImmediate(() => {
      const calls = [];
      for (let bytes = 0; this.#unsent.length && calls.length < MAX_MESSAGE_CALLS && bytes < MAX_MESSAGE_BYTES; ) {
        const next = this.#unsent.shift();
        bytes += next.bytes;
        calls.push(next.call);
      }
      const more = () => {
        this.#writing = false;
        if (this.#unsent.length) this.#write();
        else if (!this.open) this.#rpc.end();
      };
      if (!calls.length) more();
      else if (this.#rpc.write({ calls })) more();
      else this.#rpc.once("drain", more); // the connection accepts no more at the moment
    });
  }

  #read({ replies, closing }) {
    for (const { id, result, error, attend } of replies ?? []) {
      const call = this.#waiting.get(id);
      if (!call) continue; // nobody waits for it
      this.#waiting.delete(id);
      if (result === "error") call.reject(new CallError(error));
      else call.resolve(attend);
    }
    if (closing) this.end(); // the connection has become old: further calls go on another
  }

  #end(error, resolve) {
    this.open = false;
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
    resolve();
  }
}

// The error of an RPC, with the server's details.
function callError(error) {
  const [details] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!details) return new CallError({ code: error.code, message: error.details });
  return new CallError(TYPES["google.rpc.Status"].deserialize(details));
}

function sizeOf(request) {
  return [request.query, request.key, request.value, request.mask, request.bias].reduce(
    (bytes, each) => bytes + (each?.data?.length ?? 0),
    0,
  );
}

function duration(seconds) {
  return { seconds: Math.floor(seconds), nanos: Math.round((seconds % 1) * 1e9) };
}

function seconds({ seconds = 0, nanos = 0 }) {
  return seconds + nanos * 1e-9;
}
