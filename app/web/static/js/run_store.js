// Everything the page of a run shows: read once, then kept current by the run's event stream.
//
// Each part is read with the `seq` up to which it is complete. Events that arrive meanwhile wait; those up to that
// `seq` are left out, the others are applied: nothing is shown twice and nothing is missing.

import { batch, signal } from '../vendor/preact.js';
import { ApiError, get } from './api.js';
import { appendPoint, createSeries, truncateFrom } from './curves.js';
import { hasLevel, LogWindow } from './log_window.js';
import { connection, followStream } from './stream.js';

const TYPES = /** @type {const} */ ([
  'status',
  'pending',
  'log',
  'metric',
  'eval',
  'checkpoint',
  'config',
  'progress',
  'sample',
  'skipped_rows',
  'export',
  'action',
  'repair',
  'device',
  'error',
]);
/** Points of each curve that are read; live points are added. */
export const READ_POINTS = 4000;
/** A curve with more points, after hours of steps, is read again, thinned. */
const MOST_POINTS = 16_000;
const LINES_AT_ONCE = 500;
const MOST_SAMPLES = 500;
const MOST_NOTES = 1000;
const MOST_READ_EVENTS = 500;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 15_000;
/** Predictions and measured values change without an event. */
const RENEW_EVERY_MS = 15_000;
const RENEW_AFTER_MS = 300;
const LIVE = new Set(['pending', 'initializing', 'running', 'checkpointing']);
const METRICS = /** @type {const} */ ([
  'epoch',
  'loss',
  'learning_rate',
  'grad_norm',
  'gpu_memory_mb',
  'samples_per_second',
]);

/** @import * as api from './api_types.js' */
/** @typedef {api.RunEvent} RunEvent */
/** @typedef {(range: { before?: number, after?: number }) => Promise<api.Page<api.LogEvent>>} ReadLines */

/**
 * Progress of a part of the page through the events; while it is read, its events wait.
 * @typedef {{ seq: number, waiting: { event: RunEvent, add: () => void }[] | null }} Part
 */

export class RunStore {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    /** Read before any part of the page is shown; null until then. @type {import('@preact/signals').Signal<api.Run>} */
    this.run = signal(/** @type {any} */ (null));
    this.error = signal(/** @type {ApiError | null} */ (null));
    /** @type {Map<string, import('./curves.js').Series>} */
    this.series = new Map();
    /** @type {import('./curves.js').Clock} */
    this.timesOfSteps = { steps: [], seconds: [] };
    this.log = new LogWindow();
    /** Level of the lines in the window: empty (all), `warning` or `error`. */
    this.logLevel = signal('');
    /** @type {api.SampleEvent[]} */
    this.samples = [];
    /** Newest GPU telemetry, and progress of the present phase. */
    this.device = signal(/** @type {api.DeviceEvent | null} */ (null));
    this.progress = signal(/** @type {api.ProgressEvent | null} */ (null));
    this.checkpoints = signal(/** @type {api.Checkpoint[] | null} */ (null));
    this.actions = signal(/** @type {api.Action[] | null} */ (null));
    this.attempts = signal(/** @type {api.Attempt[] | null} */ (null));
    /** Events of a timeline: repairs, actions, status changes, skipped rows. */
    this.notes = signal(/** @type {RunEvent[]} */ ([]));
    this.hasOlderNotes = signal(false);
    /** Newest event with the configuration in effect. @type {api.ConfigEvent | null} */
    this.config = null;
    /** Failures of parts of the page that are tried again, by the name of the part. */
    this.failures = signal(/** @type {Record<string, ApiError>} */ ({}));
    /** Raised when the curves, the log or the samples changed. */
    this.curvesVersion = signal(0);
    this.logVersion = signal(0);
    this.samplesVersion = signal(0);
    /** @type {{ curves: Part, log: Part, history: Part }} */
    this.parts = { curves: { seq: 0, waiting: [] }, log: { seq: 0, waiting: [] }, history: { seq: 0, waiting: [] } };
    this.abortController = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.renewalTimer = undefined;
    /** @type {ReturnType<typeof setInterval> | undefined} */
    this.renewalInterval = undefined;
    this.closeStream = () => {};
    /** The last change of the window of the log. */
    this.lastLogChange = Promise.resolve();
    this.frameRequest = 0;
    /** @type {RunEvent[]} */
    this.queue = [];
  }

  /**
   * True while a part of the page has not been read yet.
   * @param {'curves' | 'log' | 'history'} name
   */
  isReading(name) {
    return this.parts[name].waiting !== null;
  }

  get isLive() {
    return LIVE.has(this.run.value?.status);
  }

  /** Read the run, follow its stream, and read everything else. */
  async open() {
    const isFound = await this.retryUntilRead(
      (error) => {
        this.error.value = error;
        if (error) connection.value = error.isTemporary ? 'lost' : 'off';
      },
      async () => {
        this.run.value = await get(`/v1/runs/${this.id}`, {}, this.abortController.signal);
      },
    );
    if (!isFound) return;
    const run = this.run.value;
    // A short id or a name may stand in the address.
    this.id = run.id;
    if (!LIVE.has(run.status)) connection.value = 'ended';
    else
      this.closeStream = followStream({
        path: `/v1/runs/${this.id}/events`,
        after: run.last_seq,
        types: TYPES,
        onEvent: (type, data) => this.receiveEvent({ ...data, type }),
        onGone: () => (this.error.value = new ApiError(404, 'run_not_found', 'The run was deleted.')),
      });
    this.renewalInterval = setInterval(
      () => this.isLive && !document.hidden && this.scheduleRenewal(0),
      RENEW_EVERY_MS,
    );
    const parts = /** @type {[string, () => Promise<void>][]} */ ([
      ['curves', () => this.readCurves()],
      ['log lines', () => this.readLog()],
      ['events', () => this.readHistory()],
      ['checkpoints and attempts', () => this.readLists()],
    ]);
    await Promise.all(
      parts.map(([name, read]) =>
        this.retryUntilRead((error) => {
          const { [name]: _before, ...others } = this.failures.peek();
          this.failures.value = error ? { ...others, [name]: error } : others;
        }, read),
      ),
    );
  }

  /**
   * Read until it succeeds, the failure is not temporary, or the store is closed.
   * @param {(error: ApiError | null) => void} show Called with each failure, and with null after a success.
   * @param {() => Promise<void>} read
   * @returns {Promise<boolean>} True if it succeeded.
   */
  async retryUntilRead(show, read) {
    for (let wait = FIRST_RETRY_MS; ; wait = Math.min(wait * 2, LAST_RETRY_MS)) {
      try {
        await read();
        show(null);
        return true;
      } catch (error) {
        if (this.abortController.signal.aborted) return false;
        const failure = error instanceof ApiError ? error : new ApiError(0, 'internal', `This page failed: ${error}.`);
        show(failure);
        if (!failure.isTemporary) return false;
        await new Promise((resolve) => setTimeout(resolve, wait));
        if (this.abortController.signal.aborted) return false;
      }
    }
  }

  close() {
    this.abortController.abort();
    this.closeStream();
    connection.value = 'off';
    clearTimeout(this.renewalTimer);
    clearInterval(this.renewalInterval);
    cancelAnimationFrame(this.frameRequest);
  }

  async readCurves() {
    const part = this.parts.curves;
    // What waits since an earlier try is in the response.
    part.waiting = [];
    const curves = await get(
      `/v1/runs/${this.id}/metrics`,
      { max_points: READ_POINTS, clock: true },
      this.abortController.signal,
    );
    this.series = new Map(Object.entries(curves.series));
    this.timesOfSteps = curves.clock;
    this.releaseEvents(part, curves.last_seq);
    this.curvesVersion.value += 1;
  }

  async readHistory() {
    this.parts.history.waiting = [];
    const { signal: abortSignal } = this.abortController;
    const path = `/v1/runs/${this.id}/history`;
    const [history, configs] = await Promise.all([
      get(path, { limit: MOST_READ_EVENTS }, abortSignal),
      get(path, { types: 'config', limit: 1 }, abortSignal),
    ]);
    const events = /** @type {RunEvent[]} */ (history.data);
    this.releaseEvents(this.parts.history, events.at(-1)?.seq ?? 0, () => {
      this.samples = events.filter((event) => event.type === 'sample');
      this.notes.value = events.filter((event) => event.type !== 'sample' && event.type !== 'eval');
      this.hasOlderNotes.value = history.has_more;
      this.config = configs.data.at(-1) ?? null;
      this.samplesVersion.value += 1;
    });
  }

  /** Read the events before those of the history. */
  async readOlderNotes() {
    const before = this.notes.value[0]?.seq;
    if (before === undefined) return;
    const history = await get(
      `/v1/runs/${this.id}/history`,
      { before, limit: MOST_READ_EVENTS },
      this.abortController.signal,
    );
    const events = /** @type {RunEvent[]} */ (history.data).filter(
      (event) => event.type !== 'sample' && event.type !== 'eval',
    );
    this.notes.value = [...events, ...this.notes.value];
    this.hasOlderNotes.value = history.has_more;
  }

  /**
   * Read the end of the log.
   * @param {string} [level] Only lines of this level from now on; by default as before.
   */
  readLog(level) {
    return this.readLines(async (read) => {
      if (level !== undefined) this.logLevel.value = level;
      const page = await read({});
      this.log.reset(page.data, { hasOlder: page.has_more, isAtEnd: true });
    });
  }

  /** Read older lines of the log into the window. */
  readOlderLines() {
    return this.readLines(async (read) => {
      const before = this.log.firstSeq;
      if (before === null || !this.log.hasOlder) return;
      const page = await read({ before });
      this.log.prepend(page.data, page.has_more);
    });
  }

  /** Read newer lines into a window that does not reach the end. */
  readNewerLines() {
    return this.readLines(async (read) => {
      if (this.log.isAtEnd) return;
      const page = await read({ after: this.log.lastSeq });
      this.log.append(page.data);
      this.log.isAtEnd = !page.has_more;
    });
  }

  /**
   * Read the part of the log around a line, unless the window has it.
   * @param {number} seq
   */
  showLine(seq) {
    return this.readLines(async (read) => {
      if (this.logLevel.value !== '') {
        this.logLevel.value = '';
        this.log.reset([], { hasOlder: false, isAtEnd: false });
      }
      if (this.log.lines.some((line) => line.seq === seq)) return;
      const [before, after] = await Promise.all([read({ before: seq }), read({ after: seq - 1 })]);
      this.log.reset([...before.data, ...after.data], { hasOlder: before.has_more, isAtEnd: !after.has_more });
    });
  }

  /**
   * Change the window of the log, one change after the other. Lines that arrive meanwhile wait, since they may be among
   * those that are read, or follow them.
   * @param {(read: ReadLines) => Promise<void>} change
   */
  readLines(change) {
    const part = this.parts.log;
    const path = `/v1/runs/${this.id}/logs/lines`;
    const turn = this.lastLogChange.then(async () => {
      part.waiting ??= [];
      try {
        await change((range) =>
          get(path, { ...range, level: this.logLevel.value, limit: LINES_AT_ONCE }, this.abortController.signal),
        );
      } finally {
        this.releaseEvents(part, Math.max(part.seq, this.log.isAtEnd ? this.log.lastSeq : 0));
        this.logVersion.value += 1;
      }
    });
    this.lastLogChange = turn.catch(() => {});
    return turn;
  }

  async readLists() {
    const { signal: abortSignal } = this.abortController;
    const [checkpoints, actions, attempts] = await Promise.all([
      get(`/v1/runs/${this.id}/checkpoints`, { limit: 200 }, abortSignal),
      get(`/v1/runs/${this.id}/actions`, { limit: 200 }, abortSignal),
      get(`/v1/runs/${this.id}/attempts`, {}, abortSignal),
    ]);
    batch(() => {
      this.checkpoints.value = checkpoints.data;
      this.actions.value = actions.data;
      this.attempts.value = attempts.data;
    });
  }

  /** Read the run and its lists again soon; several requests at once are one. */
  scheduleRenewal(after = RENEW_AFTER_MS) {
    if (this.renewalTimer !== undefined) return;
    this.renewalTimer = setTimeout(async () => {
      this.renewalTimer = undefined;
      try {
        const run = await get(`/v1/runs/${this.id}`, {}, this.abortController.signal);
        this.run.value = run;
        await this.readLists();
      } catch (error) {
        // The stream tells the state of the connection; the next renewal tries again.
        if (!(error instanceof ApiError) && !this.abortController.signal.aborted) throw error;
      }
    }, after);
  }

  /**
   * Apply the events that waited for a part.
   * @param {Part} part
   * @param {number} seq The part is complete up to here.
   * @param {() => void} [show] Shows what was read.
   */
  releaseEvents(part, seq, show) {
    part.seq = seq;
    const waiting = part.waiting ?? [];
    part.waiting = null;
    batch(() => {
      show?.();
      for (const { event, add } of waiting) if (event.seq > seq) add();
    });
  }

  /**
   * Take an event from the stream. Events are applied together, once for each frame of the screen.
   * @param {RunEvent} event
   */
  receiveEvent(event) {
    this.queue.push(event);
    if (this.queue.length === 1) this.frameRequest = requestAnimationFrame(() => this.applyQueuedEvents());
  }

  applyQueuedEvents() {
    const events = this.queue;
    this.queue = [];
    batch(() => events.forEach((event) => this.applyEvent(event)));
  }

  /** @param {RunEvent} event */
  applyEvent(event) {
    switch (event.type) {
      case 'metric':
      case 'eval':
        this.addToPart('curves', event, () =>
          event.type === 'metric' ? this.addMetric(event) : this.addEvaluation(event),
        );
        break;
      case 'log':
        this.addToPart('log', event, () => {
          if (!this.log.isAtEnd || !hasLevel(event.level, this.logLevel.value)) return;
          this.log.append([event]);
          this.logVersion.value += 1;
        });
        break;
      case 'sample':
        this.addToPart('history', event, () => {
          this.samples = [...this.samples, event].slice(-MOST_SAMPLES);
          this.samplesVersion.value += 1;
        });
        break;
      case 'device':
        this.device.value = event;
        break;
      case 'progress':
        this.progress.value = event;
        break;
      case 'status':
        this.run.value = { ...this.run.value, status: event.to };
        this.progress.value = null;
        this.addNote(event);
        // A new attempt may start at an earlier step: its curves replace those of the attempt before from there on.
        if (event.to === 'running' && event.from === 'initializing') {
          this.rereadCurves();
        }
        this.scheduleRenewal();
        break;
      case 'end':
      case 'checkpoint':
      case 'action':
      case 'config':
      case 'export':
      case 'pending':
      case 'error':
        this.addNote(event);
        this.scheduleRenewal();
        break;
      case 'repair':
      case 'skipped_rows':
        this.addNote(event);
        break;
    }
  }

  /** Replacements of defaults that the device cannot honor, of the newest attempt. */
  readReplacements() {
    const newest = this.notes.value.findLast((event) => event.type === 'config') ?? this.config;
    return newest?.replaced ?? [];
  }

  /** @param {RunEvent} event */
  addNote(event) {
    this.addToPart('history', event, () => {
      if (event.type === 'config') this.config = event;
      this.hasOlderNotes.value ||= this.notes.value.length >= MOST_NOTES;
      this.notes.value = [...this.notes.value, event].slice(-MOST_NOTES);
    });
  }

  /** @param {'curves' | 'log' | 'history'} name @param {RunEvent} event @param {() => void} add */
  addToPart(name, event, add) {
    const part = this.parts[name];
    if (part.waiting !== null) part.waiting.push({ event, add });
    else if (event.seq > part.seq) {
      part.seq = event.seq;
      add();
    }
  }

  /** @param {api.MetricEvent} event */
  addMetric(event) {
    const { step } = event;
    this.dropLaterPass(step);
    const gaps = new Set(event.non_finite ?? []);
    const add = (/** @type {string} */ name, /** @type {string} */ field, /** @type {unknown} */ value) => {
      // Null is a value that was not finite only where the event says so; otherwise there is none.
      if (typeof value === 'number' || (value === null && gaps.has(field))) this.addPoint(name, step, value);
    };
    for (const name of METRICS) add(name, name, event[name]);
    for (const [name, value] of Object.entries(event.extra ?? {})) add(`extra.${name}`, `extra.${name}`, value);
    this.addTime(event);
    const run = this.run.value;
    this.run.value = { ...run, current_step: step, current_epoch: event.epoch ?? run.current_epoch };
    this.curvesVersion.value += 1;
    if ((this.series.get('loss')?.steps.length ?? 0) > MOST_POINTS) this.rereadCurves();
  }

  /**
   * Drop the points of an earlier pass before those of a metric are added: metrics from its step on, evaluations after.
   * @param {number} step
   */
  dropLaterPass(step) {
    const last = this.series.get('loss')?.steps.at(-1);
    if (last === undefined || step > last) return;
    for (const [name, series] of this.series) truncateFrom(series, name.startsWith('eval.') ? step + 1 : step);
  }

  /** Read the curves again; events that arrive meanwhile wait. */
  rereadCurves() {
    if (this.parts.curves.waiting !== null) return;
    this.parts.curves.waiting = [];
    this.readCurves().catch(() => {
      // What is shown stays, and the events that waited are added to it; the next attempt or surplus reads again.
      if (!this.abortController.signal.aborted) this.releaseEvents(this.parts.curves, this.parts.curves.seq);
    });
  }

  /** @param {api.EvalEvent} event */
  addEvaluation(event) {
    for (const [name, value] of Object.entries(event.metrics ?? {})) {
      if (typeof value === 'number' || value === null) this.addPoint(`eval.${name}`, event.step, value);
    }
    this.curvesVersion.value += 1;
    this.scheduleRenewal();
  }

  /** @param {string} name @param {number} step @param {number | null} value */
  addPoint(name, step, value) {
    let series = this.series.get(name);
    if (!series) this.series.set(name, (series = createSeries()));
    appendPoint(series, step, value);
  }

  /** @param {api.MetricEvent} event */
  addTime(event) {
    const started = this.run.value?.started_at;
    if (!started || !event.ts) return;
    const { steps, seconds } = this.timesOfSteps;
    while (steps.length > 0 && steps[steps.length - 1] >= event.step) {
      steps.pop();
      seconds.pop();
    }
    steps.push(event.step);
    seconds.push((Date.parse(event.ts) - Date.parse(started)) / 1000);
  }
}
