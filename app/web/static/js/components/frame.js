// Frame of every page: navigation, state of the stream, account.

import { html } from '../../vendor/preact.js';
import { sendRequest, get } from '../api.js';
import { useAction, useResource } from '../resource.js';
import { path } from '../router.js';
import { hasScope, session, signOut } from '../session.js';
import { connection } from '../stream.js';
import { chooseTheme, theme } from '../theme.js';
import * as format from '../format.js';
import { Dialog, Menu } from './controls.js';
import { Icon } from './icon.js';
import { ErrorText } from './states.js';

const PAGES = [
  ['/', 'Runs'],
  ['/experiments', 'Experiments'],
  ['/datasets', 'Datasets'],
  ['/try', 'Try it'],
  ['/workers', 'Workers'],
  ['/webhooks', 'Webhooks'],
];
const QUEUE_EVERY_MS = 10_000;
const THEMES = /** @type {const} */ ([
  ['auto', 'Theme of the system'],
  ['light', 'Light theme'],
  ['dark', 'Dark theme'],
]);
const CONNECTION_LABELS = {
  connecting: 'Connecting',
  live: 'Live',
  lost: 'Connection lost, trying again',
  ended: 'Ended',
  off: '',
};

/** @param {string} pagePath */
function isCurrent(pagePath) {
  if (pagePath === '/') return path.value === '/' || /^\/(runs|compare|new)\b/.test(path.value);
  return path.value.startsWith(pagePath);
}

/** @param {{ icon: string, children: any }} props */
export function Frame({ icon, children }) {
  if (path.value === '/login') return children;
  return html`
    <header class="top">
      <a class="brand" href="/" aria-label="Anneal, all runs"><img src=${icon} alt="" /><b>Anneal</b></a>
      <nav class="nav" aria-label="Pages">
        ${PAGES.map(
          ([pagePath, name]) => html`<a href=${pagePath} aria-current=${isCurrent(pagePath) ? 'page' : undefined}>
            ${name}
          </a>`,
        )}
      </nav>
      <span class="grow"></span>
      <span class="conn" data-state=${connection.value} role="status">
        ${CONNECTION_LABELS[connection.value] && html`
          <i></i>
          <span class="hide-s">${CONNECTION_LABELS[connection.value]}</span>
        `}
      </span>
      ${hasScope('write') && html`<a class="btn primary small" href="/new" aria-label="New run">
        <${Icon} name="plus" />
        <span class="hide-s">New run</span>
      </a>`}
      <${Account} />
    </header>
    <main class="page" id="main" tabindex="-1">${session.value && html`<${PausedQueue} />`}${children}</main>
  `;
}

/** Banner of every page while the queue is paused. */
function PausedQueue() {
  const queue = useResource((signal) => get('/v1/queue', {}, signal), 'queue', { everyMs: QUEUE_EVERY_MS });
  const resuming = useAction();
  /** @type {import('../api_types.js').Pause | null | undefined} */
  const pause = queue.data?.pause;
  if (!pause) return null;
  const resume = () =>
    resuming.run(async () => {
      await sendRequest('POST', '/v1/queue/resume', { body: {} });
      queue.reload();
    });
  return html`<div class="banner paused" role="status">
    <${Icon} name="warn" />
    <div>
      <h2>The queue is paused: no run starts.</h2>
      <p>By ${pause.paused_by}, ${format.clock(pause.paused_at)}${pause.reason && `: ${pause.reason}`}</p>
      <${ErrorText} error=${resuming.error} />
    </div>
    ${hasScope('admin') && html`<button type="button" class="btn" disabled=${resuming.busy} onClick=${resume}>
      Resume the queue
    </button>`}
  </div>`;
}

function Account() {
  const current = session.value;
  const signingOut = useAction();
  if (!current) return null;
  const expiry = current.expires_at ? `session until ${format.clock(current.expires_at)}` : 'signed in with a key';
  return html`
    <${Menu} kind="quiet icon" label="Account and theme" button=${html`<${Icon} name="user" />`}>
      <div class="about"><b>${current.name}</b><small>${current.scopes.join(', ')} · ${expiry}</small></div>
      <hr />
      ${THEMES.map(
        ([value, text]) => html`<button
          type="button"
          aria-pressed=${String(theme.value === value)}
          onClick=${() => chooseTheme(value)}
        >
          ${text}
          ${theme.value === value ? ' ✓' : ''}
        </button>`,
      )}
      <hr />
      <a href="/docs">API reference</a>
      <button type="button" disabled=${signingOut.busy} onClick=${() => signingOut.run(signOut)}>Sign out</button>
    <//>
    ${signingOut.error && html`<${Dialog} title="You are still signed in" onClose=${signingOut.clear}>
      <${ErrorText} error=${signingOut.error} />
    <//>`}
  `;
}
