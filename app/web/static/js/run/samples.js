// Texts that the model wrote during training, by prompt.

import { html } from '../../vendor/preact.js';
import { Empty } from '../components/states.js';
import * as format from '../format.js';

/** @import * as api from '../api_types.js' */

/** Newest samples of a prompt that are shown. */
const MOST_OF_PROMPT = 20;

/** @param {{ store: import('../run_store.js').RunStore }} props */
export function Samples({ store }) {
  void store.samplesVersion.value; // draw again with new samples
  const groups = groupByPrompt(store.samples);
  if (groups.length === 0) {
    return html`<section class="box">
      <${Empty} title="No sample yet.">
        <p class="muted">
          Set <code>sample_prompts</code> in the configuration, or use “Generate samples” while the run trains.
        </p>
      <//>
    </section>`;
  }
  return html`<div class="side">
    ${groups.map(
      ({ prompt, samples }) => html`<section class="box" key=${prompt}>
        <header>
          <h2 class="mono clip grow">${prompt.split('\n')[0]}</h2>
          <span class="sub num">${format.counted(samples.length, 'sample')}</span>
        </header>
        ${prompt.includes('\n') && html`<div class="say"><p class="q mono pre">${prompt}</p></div>`}
        ${samples
          .slice(-MOST_OF_PROMPT)
          .reverse()
          .map(
            (sample) => html`<div class="say row baseline" key=${sample.seq}>
              <span class="sub num nowrap at">step ${format.integer(sample.step)}</span>
              <p class="a grow">${sample.completion}</p>
              ${sample.rewards && html`<span class="sub num nowrap">
                ${Object.entries(sample.rewards)
                  .map(([name, value]) => `${name} ${format.significant(/** @type {number | null} */ (value))}`)
                  .join(' · ')}
              </span>`}
            </div>`,
          )}
      </section>`,
    )}
  </div>`;
}

/**
 * @param {api.SampleEvent[]} samples In order.
 * @returns {{ prompt: string, samples: api.SampleEvent[] }[]} Newest prompt first.
 */
export function groupByPrompt(samples) {
  /** @type {Map<string, api.SampleEvent[]>} */
  const groups = new Map();
  for (const sample of samples) {
    const group = groups.get(sample.prompt) ?? [];
    groups.delete(sample.prompt); // the newest comes last
    groups.set(sample.prompt, [...group, sample]);
  }
  return [...groups].map(([prompt, groupSamples]) => ({ prompt, samples: groupSamples })).reverse();
}
