// Buttons that lead to the next page of a list, and back to its first one.

import { html } from '../../vendor/preact.js';
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
