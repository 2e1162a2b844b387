// Resources of a run in plain words. Pure: no access to the page.

import * as format from '../format.js';

const NOUNS = { cuda: 'GPU', cpu: 'CPU device' };

/**
 * Devices of a run, and what else it asks of them.
 * @param {any} run
 * @returns {{ devices: string, conditions: string[] }}
 */
export function resourcesOf({ resources: asked, requirements: needs }) {
  const name = asked.gpu ? ` (${asked.gpu})` : '';
  const where = asked.hosts > 1 ? ` on ${format.counted(asked.hosts, 'host')}` : '';
  const noun = NOUNS[/** @type {keyof typeof NOUNS} */ (needs.kind)] ?? 'device';
  const conditions = [
    asked.memory_mb && `at least ${format.gib(asked.memory_mb)} GiB each`,
    needs.sharded && 'model divided among them',
    needs.sequence_parallel > 1 && `${needs.sequence_parallel} share each sequence`,
    needs.expert_parallel > 1 && `${needs.expert_parallel} share the experts`,
    asked.labels.length > 0 && `${asked.labels.length > 1 ? 'labels' : 'label'} ${asked.labels.join(', ')}`,
  ];
  return { devices: `${format.counted(asked.devices, noun)}${name}${where}`, conditions: conditions.filter(Boolean) };
}
