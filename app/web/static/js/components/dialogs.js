// Dialogs that send a request: forms, and confirmations of a deletion.

import { html } from '../../vendor/preact.js';
import { sendRequest } from '../api.js';
import { useAction } from '../resource.js';
import { useNavigation } from '../router.js';
import { Dialog } from './controls.js';
import { ErrorText } from './states.js';

/**
 * Dialog with a form. It stays open, with the error, if the request fails.
 * @param {{
 *   title: string, onSubmit: () => Promise<void>, onClose: () => void, children: any, verb?: string,
 *   busyText?: string, labels?: Record<string, string>,
 * }} props `busyText`: what happens while a request takes long; `labels`: of its fields, by their names in the API.
 */
export function FormDialog({ title, onSubmit, onClose, children, verb = 'Save', busyText, labels }) {
  const action = useAction();
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    action.run(onSubmit);
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <form class="stackform" onSubmit=${submit}>
      ${children}
      ${busyText && action.busy && html`<p class="muted" role="status">${busyText}</p>`}
      <${ErrorText} error=${action.error} labels=${labels} />
      <footer>
        <button type="button" class="btn" onClick=${onClose}>Cancel</button>
        <button class="btn primary" disabled=${action.busy}>${verb}</button>
      </footer>
    </form>
  <//>`;
}

/**
 * Dialog that deletes a resource and then shows another page.
 * @param {{
 *   what: string, path: string, nextPage: string, onClose: () => void, children: any,
 *   query?: import('../api.js').Options['query'],
 * }} props `path`: of the resource in the API; `children`: what is deleted with it.
 */
export function DeleteDialog({ what, path, nextPage, onClose, children, query }) {
  const navigate = useNavigation();
  const action = useAction();
  const deleteResource = () =>
    action.run(async () => {
      await sendRequest('DELETE', path, { query });
      navigate(nextPage, { replace: true });
    });
  return html`<${Dialog} title=${`Delete this ${what}?`} onClose=${onClose}>
    <p>${children} This cannot be undone.</p>
    <${ErrorText} error=${action.error} />
    <footer>
      <button type="button" class="btn" onClick=${onClose}>Cancel</button>
      <button type="button" class="btn danger" disabled=${action.busy} onClick=${deleteResource}>
        Delete the ${what}
      </button>
    </footer>
  <//>`;
}
