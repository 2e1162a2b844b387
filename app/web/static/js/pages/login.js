// Sign in: with a link that works once, which the address carries behind `#`, or with a key.

import { html, useEffect, useState } from '../../vendor/preact.js';
import { matchRoute } from '../addresses.js';
import { Prose } from '../components/states.js';
import { useAction } from '../resource.js';
import { navigate } from '../router.js';
import { nextAddress, signIn } from '../session.js';

export const title = 'Sign in';
const ICON = new URL('../../icon.svg', import.meta.url).href;

export default function Login() {
  const [key, setKey] = useState('');
  const action = useAction();
  const enter = (/** @type {{ key: string } | { link: string }} */ credentials) =>
    action.run(async () => {
      await signIn(credentials);
      const next = nextAddress();
      // Others than pages of the dashboard, such as the API reference, are loaded.
      if (matchRoute(next.split('?')[0])) navigate(next, { replace: true });
      else location.replace(next);
    });
  useEffect(() => {
    const useLink = () => {
      const link = location.hash.slice(1);
      if (!link) return;
      // The link leaves the history before it is used.
      history.replaceState(null, '', location.pathname + location.search);
      enter({ link });
    };
    useLink();
    // A link that is opened in a tab at this page changes only what follows `#`: no page is loaded.
    addEventListener('hashchange', useLink);
    return () => removeEventListener('hashchange', useLink);
  }, []);
  return html`<main class="signin" id="main" tabindex="-1">
    <div class="row signin-brand"><img src=${ICON} width="30" height="30" alt="" /><b>Anneal</b></div>
    <form
      class="box"
      onSubmit=${(/** @type {Event} */ event) => {
        event.preventDefault();
        enter({ key: key.trim() });
      }}
    >
      <h1>Sign in</h1>
      <p class="muted">On the machine that runs Anneal, <code>anneal open</code> signs you in without a key.</p>
      <div class="f">
        <label for="key">API key</label>
        <input type="text" name="username" autocomplete="username" value="Anneal" readonly hidden />
        <input
          id="key"
          type="password"
          autocomplete="current-password"
          placeholder="anneal_…"
          required
          value=${key}
          aria-invalid=${action.error ? 'true' : undefined}
          aria-describedby="key-help"
          onInput=${(/** @type {any} */ event) => setKey(event.target.value)}
        />
        ${action.error
          ? html`<p id="key-help" class="err" role="alert"><${Prose} text=${action.error.message} /></p>`
          : html`<p id="key-help" class="hint">
              The browser keeps a session of 30 days, never the key. Revoking the key ends the session.
            </p>`}
      </div>
      <button class="btn primary" disabled=${action.busy}>${action.busy ? 'Signing in …' : 'Sign in'}</button>
    </form>
  </main>`;
}
