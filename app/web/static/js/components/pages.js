// Buttons that lead to the next page of a list, and back to its first one.

import { html } from '../../vendor/preact.js';
import * as format from '../format.js';
import { setQuery } from '../router.js';

/**
 * @param {{
 *   after: string | null, page: { data: { id: string }[], has_more: boolean } | undefined, children?: any,
 * }} props `after`: ID after which the page begins, from the address; `children`: shown before the buttons.
 */
export const PageButtons = ({ after, page, children }) => html`<div class="row foot">
  ${children}
  <span class="grow"></span>
  ${after && html`<button type="button" class="btn small" onClick=${() => setQuery({ after: null })}>
    First page
  </button>`}
  ${page?.has_more && html`<button
    type="button"
    class="btn small"
    onClick=${() => {
      setQuery({ after: page.data.at(-1)?.id });
      scrollTo(0, 0);
    }}
  >
    Next page
  </button>`}
</div>`;

/**
 * Buttons that turn the pages of a list which is read from page to page.
 * @param {{ isFirst: boolean, isLast: boolean, onPrevious: () => void, onNext: () => void }} props
 */
export const TurnButtons = ({ isFirst, isLast, onPrevious, onNext }) => html`
  <button type="button" class="btn small" disabled=${isFirst} onClick=${onPrevious}>Previous</button>
  <button type="button" class="btn small" disabled=${isLast} onClick=${onNext}>Next</button>
`;

/**
 * Position of a page among all rows.
 * @param {{ first: number, last: number, total: number | null }} props
 */
export const RowRange = ({ first, last, total }) => html`<span class="sub num">
  ${format.integer(first)} to ${format.integer(last)} of ${format.integer(total)}
</span>`;
