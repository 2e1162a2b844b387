// Answers of a prediction, row by row, alone or beside those of another prediction on the same dataset.

import { html, useState } from '../../vendor/preact.js';
import { get, getBytes } from '../api.js';
import { RowRange, TurnButtons } from '../components/pages.js';
import { Empty, Loaded } from '../components/states.js';
import { Cell } from '../datasets/rows.js';
import * as format from '../format.js';
import { useResource } from '../resource.js';
import { query, setQuery } from '../router.js';

/** @import * as api from '../api_types.js' */

const PAGE_SIZE = 10;
const FIRST_BYTES = 64 * 1024;
/** Longest page, of which the rows that fit are shown. */
const MOST_BYTES = 4 * 1024 * 1024;
const NEWLINE = 10;

/**
 * @typedef {object} AnsweredRow
 * @property {number} row
 * @property {any} prompt
 * @property {string | null} reference
 * @property {string | null} prediction
 * @property {string} finish_reason
 * @property {string | null} problem
 * @property {number} completion_tokens
 * @property {Record<string, number | null>} scores
 */

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function Answers({ store }) {
  const run = store.run.value;
  const beside = query.value.get('beside');
  const others = useResource(
    (signal) =>
      get('/v1/runs', { task: 'predict', status: 'completed', dataset_id: run.dataset_id, limit: 100 }, signal),
    run.dataset_id,
  );
  if (run.fine_tuned_model === null)
    return html`<section class="box">
      <${Empty} title="No answers yet."><p class="muted">They are shown when all rows are answered.</p><//>
    </section>`;
  const choices = /** @type {(api.RunRow & Pick<api.Run, 'parent_run_id'>)[]} */ (others.data?.data ?? []).filter(
    (other) => other.id !== run.id,
  );
  return html`<${Rows}
    key=${beside}
    runs=${[run.id, ...(beside ? [beside] : [])]}
    names=${[run.name, choices.find((other) => other.id === beside)?.name ?? format.shortId(beside ?? '')]}
    total=${run.total_steps}
  >
    <select
      aria-label="Compare with another prediction"
      value=${beside ?? ''}
      onChange=${(/** @type {any} */ event) => setQuery({ beside: event.target.value })}
    >
      <option value="">Compare with …</option>
      ${choices.map(
        (other) => html`<option value=${other.id}>
          ${other.name}, ${other.parent_run_id ? 'of a checkpoint' : 'of a model'}, ${format.clock(other.created_at)}
          ${other.best_eval == null ? '' : ` (${format.significant(other.best_eval)})`}
        </option>`,
      )}
    </select>
  <//>`;
}

/** @param {{ runs: string[], names: string[], total: number | null, children: any }} props */
function Rows({ runs, names, total, children }) {
  // Positions of the pages so far in the file of each run; the last ones are shown.
  const [pages, setPages] = useState(/** @type {number[][]} */ ([runs.map(() => 0)]));
  const places = pages[pages.length - 1];
  const page = useResource(
    (signal) => Promise.all(runs.map((run, index) => readRows(run, places[index], signal))),
    `${runs} ${places}`,
  );
  const shown = page.data ? Math.min(...page.data.map((part) => part.rows.length)) : 0;
  const rows = page.data?.[0].rows.slice(0, shown) ?? [];
  const turnPage = () =>
    setPages([
      ...pages,
      /** @type {import('../resource.js').Resource<Part[]>} */ (page).data?.map((part) => part.ends[shown - 1]) ??
        places,
    ]);
  return html`<section class="box" aria-label="Answers">
    <header>
      <h2>Answers</h2>
      ${rows.length > 0 && html`<${RowRange}
        first=${rows[0].row + 1}
        last=${rows[rows.length - 1].row + 1}
        total=${total}
      />`}
      <span class="grow"></span>
      ${children}
      <${TurnButtons}
        isFirst=${pages.length === 1}
        isLast=${!page.isCurrent || rows.length === 0 || rows[rows.length - 1].row + 1 === total}
        onPrevious=${() => setPages(pages.slice(0, -1))}
        onNext=${turnPage}
      />
    </header>
    <${Loaded} resource=${page} what="answers">
      ${(/** @type {Part[]} */ parts) => html`<ol class="rows">
        ${parts[0].rows
          .slice(0, shown)
          .map(
            (row, index) => html`<li key=${row.row}>
              <span class="sub num">${format.integer(row.row + 1)}</span>
              <${Row} answers=${parts.map((part) => part.rows[index])} names=${names} />
            </li>`,
          )}
      </ol>`}
    <//>
  </section>`;
}

/** @param {{ answers: AnsweredRow[], names: string[] }} props Answers of each run to the same row. */
const Row = ({ answers, names }) => html`<div class="grow talk">
  <${Cell} value=${answers[0].prompt} role="prompt" />
  ${answers[0].reference !== null && html`<div>
    <p class="sub">reference</p>
    <p class="pre">${answers[0].reference}</p>
  </div>`}
  <div class=${answers.length > 1 ? 'pair' : 'talk'}>
    ${answers.map(
      (answer, index) => html`<div>
        ${answers.length > 1 && html`<p class="sub">${names[index]}</p>`}
        ${answer.prediction === null
          ? html`<p class="warning-text">No answer: ${answer.problem}</p>`
          : html`<div class="bubble">${answer.prediction}</div>`}
        <p class="sub num">${describeAnswer(answer)}</p>
      </div>`,
    )}
  </div>
</div>`;

/** @param {AnsweredRow} answer */
const describeAnswer = (answer) =>
  [
    answer.finish_reason === 'length' && `cut after ${format.counted(answer.completion_tokens, 'token')}`,
    ...Object.entries(answer.scores).map(([name, value]) => `${name} ${format.significant(value)}`),
  ]
    .filter(Boolean)
    .join(' · ');

/** @typedef {{ rows: AnsweredRow[], ends: number[] }} Part Rows of a page, and the position after each of them. */

/**
 * Read the rows of a page from the file of a run, which may be far too large to read as a whole.
 * @param {string} runId
 * @param {number} start Position of the first row.
 * @param {AbortSignal} signal
 * @returns {Promise<Part>}
 */
async function readRows(runId, start, signal) {
  for (let size = FIRST_BYTES; ; size *= 4) {
    const bytes = await getBytes(`/v1/runs/${runId}/artifacts/predictions.jsonl`, start, size, signal);
    const part = parseRows(bytes, start);
    if (part.rows.length === PAGE_SIZE || bytes.length < size || size >= MOST_BYTES) return part;
  }
}

/**
 * @param {Uint8Array} bytes From the start of a row; the last row may be cut.
 * @param {number} start Position of the first byte in the file.
 * @returns {Part}
 */
export function parseRows(bytes, start) {
  /** @type {Part} */
  const part = { rows: [], ends: [] };
  const decoder = new TextDecoder();
  let from = 0;
  while (part.rows.length < PAGE_SIZE) {
    const end = bytes.indexOf(NEWLINE, from);
    if (end < 0) break;
    part.rows.push(JSON.parse(decoder.decode(bytes.subarray(from, end))));
    part.ends.push(start + end + 1);
    from = end + 1;
  }
  return part;
}
