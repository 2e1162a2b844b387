// What happened to a run, newest first: attempts, repairs, actions, skipped rows.

import { html } from '../../vendor/preact.js';
import { Chip } from '../components/controls.js';
import { ErrorText, Loading, Prose } from '../components/states.js';
import * as format from '../format.js';
import { useAction } from '../resource.js';

/** @import * as api from '../api_types.js' */

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function History({ store }) {
  const attempts = store.attempts.value;
  const actions = store.actions.value;
  const older = useAction();
  if (!attempts || !actions) return html`<${Loading} what="history" />`;
  const notes = store.notes.value.filter((event) => describeEvent(event));
  return html`<div class="side">
    <section class="box scroll" tabindex="0" role="region" aria-label="Attempts">
      <header><h2>Attempts</h2></header>
      <table class="table">
        <thead>
          <tr>
            <th>Attempt</th>
            <th>Worker</th>
            <th>Started</th>
            <th>Took</th>
            <th class="right">From step</th>
            <th>Ended</th>
          </tr>
        </thead>
        <tbody>
          ${attempts.map(
            (attempt) => html`<tr key=${attempt.attempt}>
              <td class="num">${attempt.attempt}</td>
              <td>${attempt.worker ?? '–'}</td>
              <td class="nowrap">${format.clock(attempt.started_at)}</td>
              <td class="num nowrap">
                ${attempt.ended_at
                  ? format.duration((Date.parse(attempt.ended_at) - Date.parse(attempt.started_at)) / 1000)
                  : 'running'}
              </td>
              <td class="right num">${format.integer(attempt.start_step)}</td>
              <td>${attempt.outcome?.replaceAll('_', ' ') ?? '–'}</td>
            </tr>`,
          )}
        </tbody>
      </table>
      ${attempts.length === 0 && html`<p class="state muted">No worker has taken the run yet.</p>`}
    </section>
    ${actions.length > 0 && html`<section class="box scroll" tabindex="0" role="region" aria-label="Actions">
      <header><h2>Actions</h2></header>
      <table class="table">
        <thead>
          <tr><th>Action</th><th>Requested</th><th>State</th><th class="right">At step</th><th>Result</th></tr>
        </thead>
        <tbody>
          ${actions.map(
            (action) => html`<tr key=${action.id}>
              <td>${action.action.replaceAll('_', ' ')}</td>
              <td class="nowrap">${format.clock(action.created_at)}</td>
              <td>${action.status}</td>
              <td class="right num">${format.integer(action.step)}</td>
              <td class="muted">
                <${Prose} text=${action.message ?? (action.result ? JSON.stringify(action.result) : '')} />
              </td>
            </tr>`,
          )}
        </tbody>
      </table>
    </section>`}
    <section class="box">
      <header><h2>Events</h2></header>
      <ul class="list">
        ${notes
          .slice()
          .reverse()
          .map(
            (event) => html`<li key=${event.seq}>
              <span class="sub num nowrap" title=${event.ts}>${format.seconds(event.ts)}</span>
              ${event.type === 'status' && html`<${Chip} status=${event.to} />`}
              <span class="grow"><${Prose} text=${describeEvent(event)} /></span>
              <span class="sub num">${event.seq}</span>
            </li>`,
          )}
        ${notes.length === 0 && html`<li class="muted">None yet.</li>`}
      </ul>
      ${store.hasOlderNotes.value && html`<div class="inside row">
        <button
          type="button"
          class="btn small"
          disabled=${older.busy}
          onClick=${() => older.run(() => store.readOlderNotes())}
        >
          Older events
        </button>
        <${ErrorText} error=${older.error} />
      </div>`}
    </section>
  </div>`;
}

/** @param {api.RunEvent} event @returns {string} Empty for events that are shown elsewhere. */
export function describeEvent(event) {
  switch (event.type) {
    case 'status':
      return event.reason ?? '';
    case 'pending':
      return event.message;
    case 'repair':
      return event.reason;
    case 'skipped_rows':
      return event.reason;
    case 'error':
      return event.message;
    case 'export':
      return `The output has the ${event.weights} weights, of step ${format.integer(event.step)}: ${event.reason}.`;
    case 'checkpoint':
      return `Saved the checkpoint of step ${format.integer(event.step)} (${format.bytes(event.bytes)}).`;
    case 'action':
      return `${event.action.replaceAll('_', ' ')} ${event.status}${event.message ? `: ${event.message}` : ''}`;
    default:
      return '';
  }
}
