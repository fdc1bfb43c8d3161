// What the engine says of itself, event by event, made into frames: whole pictures of one moment.
// docs/reference has the events' form. A frame is never changed once it is made.

export const FREE = 0;
export const CACHED = 1;
export const HELD = 2;
export const SHARED = 3;
export const SWAPPED = 4;

const MAX_LIVE_FRAMES = 900;
const AGAIN_MS = 1500;

/** Returns the frame that an event makes of the one before it; a snapshot needs none. */
export function frameOf(before, event) {
  const isWhole = event.type === "snapshot" || before === null;
  const requests = new Map(isWhole ? [] : before.requests);
  for (const name of event.gone) requests.delete(name);
  for (const request of event.requests) requests.set(request.n, request);
  return {
    seq: event.seq,
    time: event.time,
    blockSize: event.block_size,
    queue: event.queue,
    counters: event.counters,
    steps: event.steps.map(markOf),
    requests,
    groups: event.groups.map((group, at) => groupOf(isWhole ? null : before.groups[at], group)),
  };
}

const markOf = ([step, ms, prefill, decode, rows]) => ({ step, ms, prefill, decode, rows });

function groupOf(before, event) {
  const size = event.num_shown;
  const isNew = !before || before.states.length !== size;
  const changes = isNew || event.runs.length > 0;
  const states = isNew ? new Uint8Array(size) : changes ? before.states.slice() : before.states;
  const owners = isNew ? new Array(size).fill("") : changes ? before.owners.slice() : before.owners;
  for (const [first, length, state, owner] of event.runs) {
    states.fill(state, first, first + length);
    owners.fill(owner, first, first + length);
  }
  return {
    number: event.group,
    window: event.window,
    numBlocks: event.num_blocks,
    counts: event.counts,
    states,
    owners,
    numHostBlocks: event.num_host_blocks,
    hostRuns: event.host_runs,
  };
}

/** The frames of a running engine, as they come; the last MAX_LIVE_FRAMES are kept. */
export class LiveSource {
  constructor(api, model) {
    this.api = api;
    this.model = model;
    this.isRecording = false;
    this.frames = [];
    this.first = 0;
    this.stopper = null;
    this.onframe = () => {};
    this.onstate = () => {};
  }

  get end() {
    return this.first + this.frames.length;
  }

  frame(index) {
    return this.frames[index - this.first];
  }

  /** Returns frames up to an index, at most `count` of them. */
  before(index, count) {
    const last = index - this.first + 1;
    return this.frames.slice(Math.max(0, last - count), last);
  }

  async reach() {}

  async start() {
    if (this.stopper) return;
    const stopper = new AbortController();
    this.stopper = stopper;
    while (!stopper.signal.aborted) {
      try {
        await this.read(stopper.signal);
        this.onstate("The server closed the event stream.");
      } catch (error) {
        if (stopper.signal.aborted) return;
        this.onstate(messageOf(error));
        if ([401, 403, 404].includes(error.status)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  async read(signal) {
    const query = this.model.name ? `?${new URLSearchParams({ model: this.model.name })}` : "";
    let last = null;
    for await (const { payload } of this.api.events(`v1/engine/events${query}`, { signal })) {
      last = frameOf(last, payload);
      this.frames.push(last);
      if (this.frames.length > MAX_LIVE_FRAMES) {
        this.frames.shift();
        this.first += 1;
      }
      this.onstate("");
      this.onframe();
    }
  }

  stop() {
    this.stopper?.abort();
    this.stopper = null;
  }
}

function messageOf(error) {
  if (error.status === 404) return "This server does not support the engine view.";
  if (error.status === 403) return "The engine view requires the operator key.";
  return error.status ? error.message : "The server cannot be reached.";
}

/** The frames of a recording, fetched in chunks where they are looked at. */
export class RecordedSource {
  constructor(api) {
    this.api = api;
    this.isRecording = true;
    this.chunks = new Map();
    this.about = { num_frames: 0, frames_in_chunk: 1, is_complete: false, file: "" };
    this.first = 0;
    this.onframe = () => {};
    this.onstate = () => {};
  }

  get end() {
    return this.about.num_frames;
  }

  frame(index) {
    const size = this.about.frames_in_chunk;
    return this.chunks.get(Math.floor(index / size))?.[index % size];
  }

  before(index, count) {
    const found = [];
    for (let at = Math.max(0, index - count + 1); at <= index; at += 1) {
      const frame = this.frame(at);
      if (frame) found.push(frame);
    }
    return found;
  }

  /** Fetches what is needed to look at a frame and those before it. */
  async reach(index, count) {
    const size = this.about.frames_in_chunk;
    const last = Math.floor(index / size);
    const first = Math.max(0, Math.floor((index - count) / size));
    const wanted = [];
    for (let at = first; at <= last; at += 1) if (!this.chunks.has(at)) wanted.push(this.fetch(at));
    await Promise.all(wanted);
  }

  async fetch(chunk) {
    const { frames } = await this.api.json(`v1/engine/recording/${chunk}`);
    const isWhole = frames.length === this.about.frames_in_chunk || this.about.is_complete;
    let last = null;
    const made = frames.map((event) => (last = frameOf(last, event)));
    if (isWhole) this.chunks.set(chunk, made);
    else this.partial(chunk, made);
  }

  /** Keeps the last chunk of a recording that is still being read until there is more of it. */
  partial(chunk, made) {
    this.chunks.set(chunk, made);
    this.stale = chunk;
  }

  async start() {
    if (this.isStarted) return;
    this.isStarted = true;
    do {
      try {
        this.about = await this.api.json("v1/engine/recording");
      } catch (error) {
        this.onstate(messageOf(error));
        return;
      }
      if (this.stale !== undefined) this.chunks.delete(this.stale);
      this.stale = undefined;
      this.onstate(this.about.problem ?? "");
      this.onframe();
      if (!this.about.is_complete) await new Promise((resolve) => setTimeout(resolve, 400));
    } while (!this.about.is_complete);
  }

  stop() {}
}
