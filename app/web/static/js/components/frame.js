// Frame of every page: navigation, state of the stream, account.

import { html } from '../../vendor/preact.js';
import { useAction } from '../resource.js';
import { path } from '../router.js';
import { may, session, signOut } from '../session.js';
import { connection } from '../stream.js';
import { choose, theme } from '../theme.js';
import * as format from '../format.js';
import { Dialog, Menu } from './controls.js';
import { Icon } from './icon.js';
import { ErrorText } from './states.js';

const PAGES = [
  ['/', 'Runs'],
  ['/experiments', 'Experiments'],
  ['/datasets', 'Datasets'],
  ['/workers', 'Workers'],
];
const THEMES = /** @type {const} */ ([
  ['auto', 'Theme of the system'],
  ['light', 'Light theme'],
  ['dark', 'Dark theme'],
]);
const CONNECTION = {
  connecting: 'Connecting',
  live: 'Live',
  lost: 'Connection lost, trying again',
  ended: 'Ended',
  off: '',
};

/** @param {string} at */
function isCurrent(at) {
  if (at === '/') return path.value === '/' || /^\/(runs|compare|new)\b/.test(path.value);
  return path.value.startsWith(at);
}

/** @param {{ icon: string, children: any }} props */
export function Frame({ icon, children }) {
  if (path.value === '/login') return children;
  return html`
    <header class="top">
      <a class="brand" href="/" aria-label="Anneal, all runs"><img src=${icon} alt="" /><b>Anneal</b></a>
      <nav class="nav" aria-label="Pages">
        ${PAGES.map(([at, name]) => html`<a href=${at} aria-current=${isCurrent(at) ? 'page' : undefined}>${name}</a>`)}
      </nav>
      <span class="grow"></span>
      <span class="conn" data-state=${connection.value} role="status">
        ${CONNECTION[connection.value] && html`<i></i><span class="hide-s">${CONNECTION[connection.value]}</span>`}
      </span>
      ${may('write') && html`<a class="btn primary small" href="/new" aria-label="New run">
        <${Icon} name="plus" />
        <span class="hide-s">New run</span>
      </a>`}
      <${Account} />
    </header>
    <main class="page" id="main" tabindex="-1">${children}</main>
  `;
}

function Account() {
  const known = session.value;
  const leaving = useAction();
  if (!known) return null;
  const until = known.expires_at ? `session until ${format.clock(known.expires_at)}` : 'signed in with a key';
  return html`
    <${Menu} kind="quiet icon" label="Account and theme" button=${html`<${Icon} name="user" />`}>
      <div class="about"><b>${known.name}</b><small>${known.scopes.join(', ')} · ${until}</small></div>
      <hr />
      ${THEMES.map(
        ([value, text]) => html`<button
          type="button"
          aria-pressed=${String(theme.value === value)}
          onClick=${() => choose(value)}
        >
          ${text}
          ${theme.value === value ? ' ✓' : ''}
        </button>`,
      )}
      <hr />
      <a href="/docs">API reference</a>
      <button type="button" disabled=${leaving.busy} onClick=${() => leaving.run(signOut)}>Sign out</button>
    <//>
    ${leaving.error && html`<${Dialog} title="You are still signed in" onClose=${leaving.clear}>
      <${ErrorText} error=${leaving.error} />
    <//>`}
  `;
}
