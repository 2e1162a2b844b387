// Rows of a dataset as people read them: chats, pairs, texts.

import { html, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { RowRange, TurnButtons } from '../components/pages.js';
import { Loaded } from '../components/states.js';
import * as format from '../format.js';
import { useResource } from '../resource.js';

/** @import * as api from '../api_types.js' */

const PAGE_SIZE = 10;

/** @param {{ dataset: api.Dataset }} props */
export function Rows({ dataset }) {
  // Positions of the pages so far; the last one is shown.
  const [pages, setPages] = useState(/** @type {(string | null)[]} */ ([null]));
  const after = pages[pages.length - 1];
  const page = useResource(
    (signal) => get(`/v1/datasets/${dataset.id}/rows`, { after, limit: PAGE_SIZE }, signal),
    `${dataset.id} ${after}`,
  );
  const shown = /** @type {{ line: number }[]} */ (page.data?.data ?? []);
  return html`<section class="box" aria-label="Rows">
    <header>
      <h2>Rows</h2>
      ${shown.length > 0 && html`<${RowRange}
        first=${shown[0].line}
        last=${shown[shown.length - 1].line}
        total=${dataset.rows}
      />`}
      <span class="grow"></span>
      <${TurnButtons}
        isFirst=${pages.length === 1}
        isLast=${!page.isCurrent || !page.data?.next}
        onPrevious=${() => setPages(pages.slice(0, -1))}
        onNext=${() => setPages([...pages, page.data.next])}
      />
    </header>
    <${Loaded} resource=${page} what="rows">
      ${(/** @type {any} */ { data }) => html`<ol class="rows">
        ${data.map(
          (/** @type {any} */ entry) => html`<li key=${entry.line}>
            <span class="sub num">${format.integer(entry.line)}</span>
            <${Row} row=${entry.row} />
          </li>`,
        )}
      </ol>`}
    <//>
  </section>`;
}

/** @param {{ row: Record<string, any> }} props */
export function Row({ row }) {
  const shownFields = new Set(['messages', 'prompt', 'completion', 'chosen', 'rejected', 'label', 'text']);
  const others = Object.entries(row).filter(([name]) => !shownFields.has(name));
  return html`<div class="grow talk">
    ${Array.isArray(row.messages) && html`<${Conversation} messages=${row.messages} />`}
    ${row.prompt != null && html`<${Cell} value=${row.prompt} role="prompt" />`}
    ${row.completion != null && html`<${Cell} value=${row.completion} role="completion" />`}
    ${(row.chosen != null || row.rejected != null) && html`<div class="pair">
      <div><p class="sub">chosen</p><${Cell} value=${row.chosen} role="chosen" /></div>
      <div><p class="sub">rejected</p><${Cell} value=${row.rejected} role="rejected" /></div>
    </div>`}
    ${typeof row.label === 'boolean' && html`<p>
      <span class=${row.label ? 'tag best' : 'tag warn'}>${row.label ? 'good' : 'bad'}</span>
    </p>`}
    ${row.text != null && html`<p class="pre">${String(row.text)}</p>`}
    ${others.length > 0 && html`<dl class="kv left">
      ${others.map(
        ([name, value]) => html`
          <dt class="mono">${name}</dt>
          <dd class="pre">${typeof value === 'string' ? value : JSON.stringify(value)}</dd>
        `,
      )}
    </dl>`}
  </div>`;
}

/** @param {{ value: any, role: string }} props A text, or a list of messages. */
export const Cell = ({ value, role }) =>
  Array.isArray(value)
    ? html`<${Conversation} messages=${value} />`
    : html`<div class=${role === 'prompt' ? 'bubble u' : 'bubble'}>${value == null ? '–' : String(value)}</div>`;

/** @param {any} message @param {boolean} hasCalls @returns {string} */
function readContent(message, hasCalls) {
  const content = message?.content;
  if (typeof content === 'string') return content;
  if (Array.isArray(content)) return content.map((part) => part?.text ?? JSON.stringify(part)).join('');
  return content == null && hasCalls ? '' : JSON.stringify(content ?? message);
}

/** @param {{ messages: any[] }} props */
const Conversation = ({ messages }) => html`${messages.map((message) => {
  const calls = message?.tool_calls ? JSON.stringify(message.tool_calls, null, 1) : null;
  const content = readContent(message, calls !== null);
  return html`<div class=${message?.role === 'user' ? 'bubble u' : 'bubble'}>
    <span class="sub">${message?.role ?? ''}</span>
    ${content}
    ${calls && html`<code class="pre">${calls}</code>`}
  </div>`;
})}`;
