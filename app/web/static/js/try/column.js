// Column of the page “Try it”: the chat with one model, and what its answer waits for.

import { html, useLayoutEffect, useRef } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Icon } from '../components/icon.js';
import { Prose } from '../components/states.js';
import * as format from '../format.js';
import { useResource } from '../resource.js';
import { splitReasoning } from './turns.js';

const LOOK_EVERY_MS = 2000;
/** Distance from the end, in pixels, from which on an answer is followed. */
const END_HEIGHT = 40;

/**
 * @param {{
 *   chat: import('./chat.js').Chat, name: string, detail: string, href: string | null, onAskAgain: () => void,
 *   onRemove: () => void,
 * }} props
 */
export function Column({ chat, name, detail, href, onAskAgain, onRemove }) {
  const turns = chat.turns.value;
  const last = turns.at(-1);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const isAtEnd = useRef(true);
  useLayoutEffect(() => {
    if (box.current && isAtEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [turns]);
  const noteScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = /** @type {HTMLElement} */ (box.current);
    isAtEnd.current = scrollTop + clientHeight >= scrollHeight - END_HEIGHT;
  };
  return html`<section class="box chat" aria-label=${name}>
    <header>
      <div class="grow">
        <h2 class="clip" title=${chat.model}>${href ? html`<a href=${href}>${name}</a>` : name}</h2>
        <p class="sub clip">${detail}</p>
      </div>
      <button type="button" class="btn quiet icon small" aria-label=${`Remove ${name}`} onClick=${onRemove}>
        <${Icon} name="cross" />
      </button>
    </header>
    <div
      class="turns"
      role="log"
      tabindex="0"
      aria-label=${`Chat with ${name}`}
      aria-busy=${String(chat.isBusy.value)}
      ref=${box}
      onScroll=${noteScroll}
    >
      ${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} />`)}
    </div>
    <footer class="row sub">
      <span class="grow" role="status"><${State} turn=${last} runId=${chat.runId.value} /></span>
      ${last?.error && html`<button type="button" class="btn small" onClick=${onAskAgain}>Ask again</button>`}
    </footer>
  </section>`;
}

/** @param {{ turn: import('./turns.js').Turn }} props */
function Turn({ turn }) {
  const { reasoning, answer } = splitReasoning(turn.text);
  return html`<div class="talk">
    <div class="bubble u">${turn.prompt}</div>
    ${reasoning && html`<details open=${!answer}>
      <summary class="sub">Reasoning</summary>
      <p class="pre muted">${reasoning}</p>
    </details>`}
    ${answer && html`<div class="bubble">${answer}</div>`}
    ${turn.calls.map(
      (call) => html`<div class="bubble" key=${call.id}>
        <span class="sub">calls the tool ${call.function.name}</span>
        <code class="pre">${call.function.arguments}</code>
      </div>`,
    )}
    ${turn.error && html`<p class="error-text" role="alert"><${Prose} text=${turn.error.message} /></p>`}
  </div>`;
}

/** @param {{ turn: import('./turns.js').Turn | undefined, runId: string | null }} props */
function State({ turn, runId }) {
  switch (turn?.state) {
    case 'asked':
      return runId ? html`<${Waiting} runId=${runId} />` : 'Asked …';
    case 'writing':
      return 'Writing …';
    case 'stopped':
      return 'Stopped.';
    case 'done': {
      const cut = turn.finishReason === 'length' ? ', cut at the maximum' : '';
      return `${format.counted(turn.tokens ?? 0, 'token')}${cut}`;
    }
  }
  return '';
}

/** What a serving run does before it answers. @param {{ runId: string }} props */
function Waiting({ runId }) {
  const run = useResource((signal) => get(`/v1/runs/${runId}`, {}, signal), runId, { everyMs: LOOK_EVERY_MS }).data;
  const link = html`<a href=${`/runs/${runId}`}>serving run</a>`;
  if (run?.status === 'initializing') return html`The ${link} loads the model …`;
  if (run?.status !== 'pending') return html`The ${link} has the question …`;
  return html`The ${link} is pending: <${Prose} text=${run.pending_reason?.message ?? 'it waits for its turn.'} />`;
}
