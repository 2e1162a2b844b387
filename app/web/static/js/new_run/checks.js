// What the service says about a new run before it is started.

import { html } from '../../vendor/preact.js';
import { ErrorText, Prose } from '../components/states.js';

/**
 * What the service says about a request: its checks, or why it cannot check it.
 * @param {import('../resource.js').Resource<any>} checked
 * @returns {{ valid: boolean, errors: any[], warnings: any[] } | undefined}
 */
export const readCheck = ({ data, error }) =>
  error?.errors.length ? { valid: false, errors: error.errors, warnings: [] } : error ? undefined : data;

/**
 * Show the control of a field of the request.
 * @param {string} name Such as `config.dpo.beta` or `resources.kind`.
 */
function focusField(name) {
  const control = document.getElementById(`field-${name.replace(/^(config|resources)\./, '').split('.')[0]}`);
  control?.closest('details')?.setAttribute('open', '');
  control?.focus();
  control?.scrollIntoView({ block: 'center' });
}

/**
 * @param {{
 *   isChecked: boolean, unreadable: { field: string, message: string }[],
 *   checked: import('../resource.js').Resource<any> | null,
 * }} props
 */
export function Checks({ isChecked, unreadable, checked }) {
  const result = checked && readCheck(checked);
  const names = new Set(unreadable.map(({ field }) => field));
  const errors = [
    ...unreadable,
    ...(result?.errors ?? []).filter((/** @type {any} */ error) => !names.has(error.field)),
  ];
  return html`<section class="box" aria-label="Checks">
    <header><h2>Checks</h2></header>
    <div class="inside" aria-live="polite">
      ${!isChecked && errors.length === 0 && html`<p class="muted">Choose a base model and a dataset.</p>`}
      ${isChecked &&
      !result &&
      (checked?.error ? html`<${ErrorText} error=${checked.error} />` : html`<p class="muted">Checking …</p>`)}
      ${result?.valid && errors.length === 0 && html`<p><span class="tag best">valid</span></p>`}
      ${(result || errors.length > 0) && html`<ul class="checks">
        ${errors.map(
          (/** @type {any} */ error) => html`<li class="error-text">
            <button type="button" class="link" onClick=${() => focusField(error.field)}>
              ${error.field}
            </button> <${Prose} text=${error.message} />
          </li>`,
        )}
        ${(result?.warnings ?? []).map(
          (/** @type {any} */ warning) => html`<li class="warning-text"><${Prose} text=${warning.message} /></li>`,
        )}
      </ul>`}
    </div>
  </section>`;
}
