// The event stream of this tab. There is one at a time: browsers allow six connections to a host over HTTP/1.1.

import { signal } from '../vendor/preact.js';
import { ApiError, get, formatQuery } from './api.js';

/** State of the stream: `live`, `connecting`, `lost` (it is tried again), `ended`, or `off`. */
export const connection = signal(/** @type {'off' | 'connecting' | 'live' | 'lost' | 'ended'} */ ('off'));

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 15_000;

/**
 * @typedef {object} StreamOptions
 * @property {string} path `/v1/runs/{id}/events` or `/v1/events`.
 * @property {number | null} after Cursor to continue from; null starts now.
 * @property {readonly string[]} types Event types to receive; `end` and `truncated` come always.
 * @property {(type: string, data: any) => void} onEvent
 * @property {() => void} [onGone] Called when the service answers that the run does not exist any more.
 */

/** @type {TabStream | null} */
let openStream = null;

/**
 * Open the stream of this tab, in the place of the one before.
 * @param {StreamOptions} options
 * @returns {() => void} Closes it.
 */
export function followStream(options) {
  openStream?.stop();
  const stream = new TabStream(options);
  openStream = stream;
  return () => {
    stream.stop();
    if (openStream === stream) {
      openStream = null;
      connection.value = 'off';
    }
  };
}

/**
 * Reads a stream, from the cursor of the last event that it passed on, whatever breaks in between. A hidden tab
 * releases its connection, and continues from the cursor when it is visible.
 */
class TabStream {
  /** @param {StreamOptions} options */
  constructor(options) {
    this.options = options;
    this.cursor = options.after;
    /** @type {EventSource | null} */
    this.source = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.tries = 0;
    this.isStopped = false;
    this.onVisibilityChange = () => (document.hidden ? this.closeSource() : this.connect());
    document.addEventListener('visibilitychange', this.onVisibilityChange);
    if (!document.hidden) this.connect();
  }

  stop() {
    this.isStopped = true;
    document.removeEventListener('visibilitychange', this.onVisibilityChange);
    this.closeSource();
  }

  closeSource() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  connect() {
    if (this.isStopped || this.source) return;
    clearTimeout(this.timer);
    const { path, types } = this.options;
    const source = new EventSource(path + formatQuery({ after: this.cursor, types: types.join(',') }));
    this.source = source;
    if (connection.value !== 'lost') connection.value = 'connecting';
    source.onopen = () => {
      this.tries = 0;
      connection.value = 'live';
    };
    source.onerror = () => {
      // The browser retries a broken connection by itself, and gives up on an error response.
      if (source.readyState === EventSource.CLOSED) this.reconnect(source);
      else if (this.source === source) connection.value = 'lost';
    };
    for (const type of [...types, 'end', 'truncated', 'cursor']) {
      source.addEventListener(type, (event) => {
        // The browser reports a broken connection under the name of the run's event `error`, without data.
        if (event instanceof MessageEvent) this.receiveMessage(source, type, event);
      });
    }
  }

  /** @param {EventSource} source @param {string} type @param {MessageEvent} message */
  receiveMessage(source, type, message) {
    if (this.source !== source) return;
    const number = Number(message.lastEventId);
    if (this.cursor !== null && number <= this.cursor && type !== 'truncated') return;
    this.cursor = number;
    if (type === 'end' && !this.options.path.startsWith('/v1/events')) {
      this.stop();
      connection.value = 'ended';
    }
    this.options.onEvent(type, JSON.parse(message.data));
  }

  /** @param {EventSource} source */
  async reconnect(source) {
    if (this.source !== source) return;
    this.closeSource();
    connection.value = 'lost';
    const wait = Math.min(FIRST_RETRY_MS * 2 ** this.tries, LAST_RETRY_MS) * (0.75 + Math.random() / 2);
    this.tries += 1;
    // An EventSource does not say why it ended: 401 leads to the page for signing in, 404 means that the run is gone.
    try {
      const remaining = await get(this.options.path, {
        follow: false,
        types: 'end',
        after: this.cursor,
        format: 'ndjson',
      });
      if (remaining === null) {
        // 204: the run has ended, and everything was read.
        this.stop();
        connection.value = 'ended';
        return;
      }
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) {
        this.stop();
        connection.value = 'off';
        this.options.onGone?.();
        return;
      }
    }
    if (!this.isStopped && !document.hidden) this.timer = setTimeout(() => this.connect(), wait);
  }
}
