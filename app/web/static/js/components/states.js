// What a page shows while it has no data: loading, an error with what to do, or an empty list with the first step.

import { html } from '../../vendor/preact.js';
import { Icon } from './icon.js';

/** @param {{ text: string }} props Text in which code stands between backticks, as in the messages of the service. */
export const Prose = ({ text }) => html`${text
  .split('`')
  .map((part, index) => (index % 2 ? html`<code>${part}</code>` : part))}`;

/**
 * Message of a failed request, if it failed.
 * @param {{ error: import('../api.js').ApiError | null, labels?: Record<string, string> }} props `labels`: of the
 *   fields of a form, by their names in the API; errors of these fields are shown by label.
 */
export const ErrorText = ({ error, labels = {} }) => {
  if (!error) return null;
  const isLabeled = error.errors.length > 0 && error.errors.every(({ field }) => field in labels);
  const lines = isLabeled ? error.errors.map(({ field, message }) => `${labels[field]}: ${message}`) : [error.message];
  return html`<div class="error-text" role="alert">
    ${lines.map((line) => html`<p><${Prose} text=${line} /></p>`)}
  </div>`;
};

/** @param {{ what: string }} props `what`: a plural noun, such as `runs`. */
export const Loading = ({ what }) => html`<p class="state muted" role="status" aria-busy="true">Loading ${what} …</p>`;

/** @param {{ error: import('../api.js').ApiError, onRetry?: () => void }} props */
export const Failure = ({ error, onRetry }) => html`<div class="state" role="alert">
  <p class="row">
    <${Icon} name="warn" />
    <b>${error.status === 0 ? 'No connection' : error.status === 404 ? 'Not found' : 'The request failed'}</b>
  </p>
  <p><${Prose} text=${error.message} /></p>
  ${error.errors.length > 0 && html`<ul>
    ${error.errors.map(
      (fieldError) => html`<li><code>${fieldError.field}</code> <${Prose} text=${fieldError.message} /></li>`,
    )}
  </ul>`}
  <p class="sub">${error.code}${error.requestId && html` · request <code>${error.requestId}</code>`}</p>
  ${onRetry && html`<p><button type="button" class="btn small" onClick=${onRetry}>Try again</button></p>`}
</div>`;

/** @param {{ title: string, children?: any }} props */
export const Empty = ({ title, children }) => html`<div class="state empty">
  <p><b>${title}</b></p>
  ${children}
</div>`;

/**
 * Content of a resource, or its state. Data that was read stays while a failure heals.
 * @param {{ resource: import('../resource.js').Resource<any>, what: string, children: (data: any) => any }} props
 */
export function Loaded({ resource, what, children }) {
  const { data, error, reload } = resource;
  if (data === undefined)
    return error ? html`<${Failure} error=${error} onRetry=${reload} />` : html`<${Loading} what=${what} />`;
  return html`
    ${error && html`<p class="stale sub" role="status">
      <${Prose} text=${error.message} /> The data below is of before.
    </p>`}
    ${children(data)}
  `;
}
