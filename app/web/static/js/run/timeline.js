// Times of a run as parts of a line: waiting, attempts, losses, and what is left. Pure: no access to the page.

import * as format from '../format.js';

/** @import * as api from '../api_types.js' */

/** @typedef {{ kind: string, from: number, to: number, label: string, about: string }} Segment */
/** @typedef {{ kind: 'checkpoint' | 'best' | 'lost' | 'action', at: number, about: string }} Mark */

const LOST_OUTCOMES = new Set(['lost', 'retried']);

/** Marks that say more come first. */
const WEIGHT = { best: 0, lost: 1, action: 2, checkpoint: 3 };

/**
 * Marks that do not lie over each other: of those that are closer than a part of the line, the weightiest is shown,
 * with what the others are about.
 * @param {Mark[]} marks @param {number} distance Least distance between two marks, in milliseconds.
 * @returns {Mark[]}
 */
export function separateMarks(marks, distance) {
  /** @type {(Mark & { others: Mark[] })[]} */
  const shownMarks = [];
  for (const mark of marks.toSorted((left, right) => WEIGHT[left.kind] - WEIGHT[right.kind] || right.at - left.at)) {
    const nearMark = shownMarks.find((shownMark) => Math.abs(shownMark.at - mark.at) < distance);
    if (nearMark) nearMark.others.push(mark);
    else shownMarks.push({ ...mark, others: [] });
  }
  return shownMarks.map(({ others, ...mark }) =>
    others.length === 0 ? mark : { ...mark, about: `${mark.about}, and ${others.length} more beside it` },
  );
}

/**
 * @param {api.Run} run
 * @param {api.Attempt[]} attempts Oldest first.
 * @param {{ checkpoints: api.Checkpoint[], actions: api.Action[] }} events
 * @param {number} now Milliseconds since 1970.
 * @returns {{ from: number, to: number, isPredicted: boolean, segments: Segment[], marks: Mark[] }}
 */
export function buildTimeline(run, attempts, { checkpoints, actions }, now) {
  const from = Date.parse(run.created_at);
  const ended = run.finished_at ? Date.parse(run.finished_at) : null;
  const expected = run.prediction?.finish_at ? Date.parse(run.prediction.finish_at) : null;
  const to = Math.max(ended ?? Math.max(expected ?? 0, now), from + 1000);
  /** @type {Segment[]} */
  const segments = [];
  /** @type {Mark[]} */
  const marks = [];
  let last = from;
  attempts.forEach((attempt) => {
    const start = Date.parse(attempt.started_at);
    const end = attempt.ended_at ? Date.parse(attempt.ended_at) : (ended ?? now);
    const gap = last === from ? 'pending' : 'lost';
    if (start > last)
      segments.push({
        kind: gap,
        from: last,
        to: start,
        label: '',
        about: `waited ${format.duration((start - last) / 1000)}`,
      });
    const place = attempt.worker ? ` on ${attempt.worker}` : '';
    const outcome = attempt.outcome ? `, ${attempt.outcome.replaceAll('_', ' ')}` : '';
    const description = `attempt ${attempt.attempt}${place}: ${format.duration((end - start) / 1000)}${outcome}`;
    segments.push({
      kind: 'running',
      from: start,
      to: end,
      label: attempts.length > 1 ? `Attempt ${attempt.attempt}` : (attempt.worker ?? ''),
      about: description,
    });
    if (LOST_OUTCOMES.has(attempt.outcome ?? ''))
      marks.push({ kind: 'lost', at: end, about: `attempt ${attempt.attempt} was lost` });
    last = end;
  });
  if (ended === null && attempts.at(-1)?.ended_at) {
    segments.push({ kind: 'pending', from: last, to: now, label: '', about: 'waits for a worker' });
    last = now;
  } else if (attempts.length === 0) {
    segments.push({ kind: 'pending', from, to: ended ?? now, label: 'Pending', about: 'waits for a worker' });
    last = ended ?? now;
  }
  if (ended === null && to > last) {
    segments.push({
      kind: 'ahead',
      from: last,
      to,
      label: `about ${format.duration((to - last) / 1000)} left`,
      about: 'predicted',
    });
  }
  for (const checkpoint of checkpoints) {
    marks.push({
      kind: checkpoint.is_best ? 'best' : 'checkpoint',
      at: Date.parse(checkpoint.created_at),
      about: `checkpoint of step ${format.integer(checkpoint.step)}`,
    });
  }
  for (const action of actions) {
    if (action.finished_at)
      marks.push({
        kind: 'action',
        at: Date.parse(action.finished_at),
        about: `${action.action.replaceAll('_', ' ')}: ${action.status}`,
      });
  }
  return {
    from,
    to,
    isPredicted: ended === null && expected !== null,
    segments,
    marks: marks.filter((mark) => mark.at >= from && mark.at <= to),
  };
}
