// Try it: a question goes to several models side by side, such as a run, its checkpoints and its base.

import { html, useEffect, useLayoutEffect, useRef, useState } from '../../vendor/preact.js';
import { get } from '../api.js';
import { Icon } from '../components/icon.js';
import { Empty, Failure } from '../components/states.js';
import * as format from '../format.js';
import { useResource } from '../resource.js';
import { query, setQuery } from '../router.js';
import { hasScope } from '../session.js';
import { Chat } from '../try/chat.js';
import { Column } from '../try/column.js';
import { readSettings, SettingsBox } from '../try/settings.js';

/** @import * as api from '../api_types.js' */
/** @typedef {{ id: string, name: string, detail: string, href: string | null }} Choice */

export const title = 'Try it';

/** Answers at a time: browsers open six connections to a host over HTTP/1.1. */
const MOST_MODELS = 4;

export default function Try() {
  const runId = query.value.get('run');
  const models = [...new Set(query.value.getAll('model'))].slice(0, MOST_MODELS);
  const listed = useResource(readChoices, 'models');
  const ofRun = useResource((signal) => readChoicesOfRun(runId ?? '', signal), runId);
  const chats = useRef(/** @type {Map<string, Chat>} */ (new Map()));
  const [prompt, setPrompt] = useState('');
  const [texts, setTexts] = useState({ system: '', tools: '', temperature: '', max_tokens: '' });
  useEffect(() => () => chats.current.forEach((chat) => chat.stop()), []);
  useEffect(() => {
    for (const [model, chat] of chats.current) if (!models.includes(model)) chat.clear();
  }, [models.join(' ')]);
  useLayoutEffect(() => {
    // Of a run, its output or newest checkpoint, and its base.
    if (models.length === 0 && ofRun.data)
      setQuery({ model: [...new Set([ofRun.data[0].id, ofRun.data[ofRun.data.length - 1].id])] });
  }, [ofRun.data]);
  if (!hasScope('write'))
    return html`
      <h1>Try it</h1>
      <p class="box state">
        Your key only reads. Sign in with one that has the scope <code>write</code> to ask
        models; <code>anneal keys create --scope write</code> on the server creates one.
      </p>
    `;
  const choices = new Map((ofRun.data ?? []).map((choice) => [choice.id, choice]));
  for (const choice of listed.data ?? []) if (!choices.has(choice.id)) choices.set(choice.id, choice);
  const shown = models.map((model) => {
    const chat = chats.current.get(model) ?? new Chat(model);
    chats.current.set(model, chat);
    return chat;
  });
  const isBusy = shown.some((chat) => chat.isBusy.value);
  const { values, problem } = readSettings(texts);
  const canAsk = prompt.trim() !== '' && shown.length > 0 && !isBusy && problem === null;
  const ask = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!canAsk) return;
    shown.forEach((chat) => chat.ask(prompt.trim(), values));
    setPrompt('');
  };
  const error = ofRun.error ?? listed.error;
  return html`
    <div class="head center">
      <h1 class="grow">Try it</h1>
      <div class="acts">
        <select
          aria-label="Add a model"
          disabled=${models.length >= MOST_MODELS}
          value=""
          onChange=${(/** @type {any} */ event) => setQuery({ model: [...models, event.target.value] })}
        >
          <option value="">Add a model …</option>
          ${[...choices.values()]
            .filter(({ id }) => !models.includes(id))
            .map(({ id, name, detail }) => html`<option key=${id} value=${id}>${name}, ${detail}</option>`)}
        </select>
        <button type="button" class="btn" onClick=${() => shown.forEach((chat) => chat.clear())}>New chat</button>
      </div>
    </div>
    <${SettingsBox} texts=${texts} problem=${problem} onChange=${setTexts} />
    ${error && html`<section class="box"><${Failure} error=${error} /></section>`}
    ${shown.length === 0 && !error && (!runId || ofRun.data) && html`<section class="box">
      <${Empty} title="No model is chosen.">
        <p class="muted">Add up to ${MOST_MODELS} runs, checkpoints or base models, which answer side by side.</p>
      <//>
    </section>`}
    <div class="chats">
      ${shown.map(
        (chat) => html`<${Column}
          key=${chat.model}
          chat=${chat}
          ...${choices.get(chat.model) ?? { name: format.shortId(chat.model), detail: '', href: null }}
          onAskAgain=${() => chat.askAgain(values)}
          onRemove=${() => setQuery({ model: models.filter((model) => model !== chat.model) })}
        />`,
      )}
    </div>
    <form class="box composer" onSubmit=${ask}>
      <label class="sr" for="question">Question</label>
      <textarea
        id="question"
        rows="2"
        placeholder="Ask all of them. Shift+Enter starts a new line."
        value=${prompt}
        onInput=${(/** @type {any} */ event) => setPrompt(event.target.value)}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
          if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) ask(event);
        }}
      ></textarea>
      <button class="btn primary" disabled=${!canAsk}>Ask</button>
      <button type="button" class="btn" disabled=${!isBusy} onClick=${() => shown.forEach((chat) => chat.stop())}>
        <${Icon} name="stop" />
        Stop
      </button>
    </form>
  `;
}

/**
 * Models that the key may ask: base models, and runs with an output.
 * @param {AbortSignal} signal
 * @returns {Promise<Choice[]>}
 */
async function readChoices(signal) {
  const [models, runs] = await Promise.all([
    get('/openai/v1/models', {}, signal),
    get('/v1/runs', { view: 'row', limit: 200 }, signal),
  ]);
  const names = new Map(runs.data.map((/** @type {api.RunRow} */ { id, name }) => [id, name]));
  return models.data.map((/** @type {{ id: string }} */ { id }) =>
    id.startsWith('run_')
      ? { id, name: names.get(id) ?? format.shortId(id), detail: 'output', href: `/runs/${id}` }
      : { id, name: id, detail: 'base model', href: null },
  );
}

/**
 * Models of a run: its output, its checkpoints, the newest first, and its base.
 * @param {string} runId
 * @param {AbortSignal} signal
 * @returns {Promise<Choice[]>}
 */
async function readChoicesOfRun(runId, signal) {
  const path = `/v1/runs/${encodeURIComponent(runId)}`;
  const [run, checkpoints] = await Promise.all([
    get(path, {}, signal),
    get(`${path}/checkpoints`, { limit: 200 }, signal),
  ]);
  const href = `/runs/${run.id}`;
  const usable = checkpoints.data.filter((/** @type {api.Checkpoint} */ checkpoint) => !checkpoint.bad_reason);
  const base = run.config.base_model;
  return [
    ...(run.fine_tuned_model ? [{ id: run.id, name: run.name, detail: 'output', href }] : []),
    ...usable.map((/** @type {api.Checkpoint} */ { id, step, is_best }) => ({
      id,
      name: `Step ${format.integer(step)}`,
      detail: `${is_best ? 'best checkpoint' : 'checkpoint'} of ${run.name}`,
      href: `${href}?tab=checkpoints`,
    })),
    { id: base, name: base, detail: 'base model', href: null },
  ];
}
