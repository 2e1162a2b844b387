// Settings of the chats of the page “Try it”.

import { html } from '../../vendor/preact.js';
import { Icon } from '../components/icon.js';

const FIELDS = /** @type {const} */ ([
  ['system', 'System message', 'textarea', { rows: 2 }],
  ['tools', 'Tools', 'textarea', { rows: 2, placeholder: '[{"type": "function", "function": {"name": "add", …}}]' }],
  ['temperature', 'Temperature', 'input', { type: 'number', min: 0, max: 2, step: 'any', placeholder: '1' }],
  ['max_tokens', 'Maximum number of tokens', 'input', { type: 'number', min: 1, placeholder: 'what the model takes' }],
]);

/** Texts of the fields. @typedef {Record<'system' | 'tools' | 'temperature' | 'max_tokens', string>} Texts */

/**
 * Values of the fields that are set, and what is wrong with the tools.
 * @param {Texts} texts
 * @returns {{ values: import('./chat.js').Settings, problem: string | null }}
 */
export function readSettings({ system, temperature, max_tokens, tools }) {
  const values = {
    system: system.trim(),
    ...(temperature && { temperature: Number(temperature) }),
    ...(max_tokens && { max_tokens: Number(max_tokens) }),
  };
  try {
    return { values: tools.trim() ? { ...values, tools: JSON.parse(tools) } : values, problem: null };
  } catch (error) {
    return { values, problem: `The tools are not JSON: ${/** @type {Error} */ (error).message}` };
  }
}

/** @param {{ texts: Texts, problem: string | null, onChange: (texts: Texts) => void }} props */
export const SettingsBox = ({ texts, problem, onChange }) => html`<details class="box group settings">
  <summary><${Icon} name="down" />Settings</summary>
  <div class="form">
    ${FIELDS.map(
      ([name, label, tag, attributes]) => html`<div class="f w6" key=${name}>
        <label for=${`setting-${name}`}>${label}</label>
        <${tag}
          ...${attributes}
          id=${`setting-${name}`}
          value=${texts[name]}
          onInput=${(/** @type {any} */ event) => onChange({ ...texts, [name]: event.target.value })}
        />
      </div>`,
    )}
    ${problem && html`<p class="error-text f w12" role="alert">${problem}</p>`}
  </div>
</details>`;
