// Chat with one model: it asks, and its signals change as the answer arrives.

import { signal } from '../../vendor/preact.js';
import { ApiError, streamAnswer } from '../api.js';
import { addChunk, buildMessages } from './turns.js';

/** @import { Turn } from './turns.js' */
/** @typedef {{ system: string, temperature?: number, max_tokens?: number, tools?: unknown }} Settings */

export class Chat {
  /** @param {string} model */
  constructor(model) {
    this.model = model;
    this.turns = signal(/** @type {Turn[]} */ ([]));
    this.isBusy = signal(false);
    /** Serving run that answers, once it is known. */
    this.runId = signal(/** @type {string | null} */ (null));
    /** Of the last question. */
    this.abortController = new AbortController();
  }

  /** @param {string} prompt @param {Settings} settings */
  async ask(prompt, { system, ...options }) {
    const abortController = new AbortController();
    const turns = this.turns.peek();
    const messages = buildMessages(system, turns, prompt);
    const body = { model: this.model, messages, ...options, stream: true, stream_options: { include_usage: true } };
    /** @type {Turn} */
    let turn = { prompt, text: '', calls: [], state: 'asked' };
    const show = (/** @type {Turn} */ changed) => {
      turn = changed;
      if (this.abortController === abortController) this.turns.value = [...turns, turn];
    };
    this.abortController = abortController;
    this.isBusy.value = true;
    this.runId.value = null;
    show(turn);
    try {
      const chunks = streamAnswer(body, abortController.signal, (runId) => (this.runId.value = runId));
      for await (const chunk of chunks) show(addChunk(turn, chunk));
      show({ ...turn, state: 'done' });
    } catch (error) {
      if (abortController.signal.aborted) show({ ...turn, state: 'stopped' });
      else if (error instanceof ApiError) show({ ...turn, state: 'failed', error });
      else throw error;
    } finally {
      if (this.abortController === abortController) this.isBusy.value = false;
    }
  }

  /** Ask the last question again. @param {Settings} settings */
  askAgain(settings) {
    const turns = this.turns.peek();
    this.turns.value = turns.slice(0, -1);
    this.ask(turns[turns.length - 1].prompt, settings);
  }

  /** End the answer that is being written; what has arrived of it stays. */
  stop() {
    this.abortController.abort();
  }

  clear() {
    this.stop();
    this.abortController = new AbortController();
    this.isBusy.value = false;
    this.turns.value = [];
  }
}
