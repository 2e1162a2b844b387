// Plugin of Prettier for the dashboard's `html` templates, which htm reads; `make lint` and `make format` use it.
//
// To htm, white space with a line break at the border of a text is nothing, and any other white space is content. A
// line break is therefore added or removed only where it is nothing, or inside a text, where it is shown as a space.

import { createRequire } from 'node:module';
import { contentOf, isElement, isText, parseTemplate } from './htm_template.js';

const require = createRequire(new URL('../../.venv/web/package.json', import.meta.url));
const { builders, printer } = require('prettier/doc');
const babel = require('prettier/plugins/babel');
const { printers: basePrinters } = require('prettier/plugins/estree');

const { breakParent, fill, group, indent, line, softline } = builders;
const basePrinter = basePrinters.estree;

/** @import { Attribute, Child, Element, Part, Text } from './htm_template.js' */

/**
 * True if there may be a line break between two children. Beside an expression, a text without one stays without one.
 * @param {Child} before @param {Child} after
 */
function isBreakable(before, after) {
  if (isText(before)) return before.breaksAfter || (isElement(after) && /[\w…]$/.test(before.text));
  if (isText(after)) return after.breaksBefore || (isElement(before) && /^\w/.test(after.text));
  return true;
}

/**
 * Words of a text with a `line` between. White space at its border is content and stays with the word.
 * @param {string} text
 */
function printText(text) {
  const [, before, words, after] = /** @type {RegExpMatchArray} */ (/^(\s*)(.*?)(\s*)$/s.exec(text));
  const printed = words.split(/[ \t\n\r]+/).flatMap((word, index) => (index === 0 ? [word] : [line, word]));
  printed[0] = before + printed[0];
  printed[printed.length - 1] += after;
  return printed;
}

/**
 * @param {Child[]} children
 * @param {any[]} expressions Printed, by index.
 */
function printChildren(children, expressions) {
  /** Contents of `fill`: words and what stands beside them, with a `line` between. @type {any[][]} */
  const groups = [];
  children.forEach((child, index) => {
    const printed = isText(child)
      ? printText(child.text)
      : [isElement(child) ? printElement(child, expressions) : expressions[child]];
    const previous = groups.at(-1);
    if (!previous || isBreakable(children[index - 1], child)) groups.push(printed);
    else previous.push([previous.pop(), printed[0]], ...printed.slice(1));
  });
  return groups.map((contents, index) => [
    index === 0 ? '' : softline,
    contents.length === 1 ? contents[0] : fill(contents),
  ]);
}

/** @param {Part[]} parts @param {any[]} expressions */
const printParts = (parts, expressions) => parts.map((part) => (typeof part === 'number' ? expressions[part] : part));

/** @param {Element} element @param {any[]} expressions */
function printElement({ tag, attributes, children, closing }, expressions) {
  const printed = attributes.map(({ name, value, quote }) =>
    value === null ? name : [name, name === '...' ? '' : '=', quote, printParts(value, expressions), quote],
  );
  const name = printParts(tag, expressions);
  const opening =
    printed.length <= 1
      ? ['<', name, printed.map((attribute) => [' ', attribute]), closing === null ? ' />' : '>']
      : group([
          ['<', name, indent(printed.map((attribute) => [line, attribute]))],
          closing === null ? [line, '/>'] : [softline, '>'],
        ]);
  if (closing === null) return opening;
  if (children.length === 0) return [opening, `<${closing}>`];
  const [first, last] = [children[0], children[children.length - 1]];
  const startBreak = isText(first) && /^\s/.test(first.text) ? '' : softline;
  const endBreak = isText(last) && /\s$/.test(last.text) ? '' : softline;
  const isNested = children.filter(isElement).some((child) => child.children.some(isElement));
  return group([
    opening,
    indent([startBreak, printChildren(children, expressions)]),
    endBreak,
    `<${closing}>`,
    isNested ? breakParent : '',
  ]);
}

/** @param {any} node */
const isTemplate = (node) => node?.type === 'TaggedTemplateExpression' && node.tag.name === 'html';

/**
 * An expression of a template.
 * @param {any} path @param {(selector?: string) => any} print
 */
function printExpression({ node }, print) {
  if (node.type === 'LogicalExpression' && node.operator === '&&' && isTemplate(node.right)) {
    return group(['${', print('left'), ' && ', print('right'), '}']);
  }
  return group(['${', print(), '}']);
}

/** @param {Child[]} children @param {any[]} expressions */
function printTemplate(children, expressions) {
  const printed = printChildren(children, expressions);
  return children.length <= 1 ? group(printed) : group([indent([softline, printed]), softline]);
}

/**
 * Refuse to write a template that htm would read in another way, with as many line breaks as there can be or with none.
 * @param {Child[]} children
 * @param {number} count Number of its expressions.
 */
function checkContent(children, count) {
  const placeholders = Array.from({ length: count }, () => '\0');
  for (const printWidth of [1, 100_000]) {
    const options = { printWidth, tabWidth: 2, useTabs: false, endOfLine: 'lf' };
    const { formatted } = printer.printDocToString(printTemplate(children, placeholders), options);
    const statics = formatted.split('\0');
    if (contentOf(parseTemplate(statics)) !== contentOf(children)) {
      throw new Error(`Formatting would change the content of a template: ${formatted}`);
    }
  }
}

/**
 * @param {any} path
 * @param {any} options
 */
function embed(path, options) {
  if (!isTemplate(path.node)) return basePrinter.embed?.(path, options);
  return async (/** @type {any} */ _textToDoc, /** @type {any} */ print) => {
    const children = parseTemplate(path.node.statics);
    const expressions = path.map((/** @type {any} */ child) => printExpression(child, print), 'quasi', 'expressions');
    checkContent(children, expressions.length);
    return ['html`', printTemplate(children, expressions), '`'];
  };
}
embed.getVisitorKeys = basePrinter.embed?.getVisitorKeys;

/** @param {any} node */
function markTemplates(node) {
  if (Array.isArray(node)) return node.forEach(markTemplates);
  if (node === null || typeof node !== 'object' || typeof node.type !== 'string') return;
  if (isTemplate(node)) {
    node.statics = node.quasi.quasis.map((/** @type {any} */ quasi) => quasi.value.raw);
    // Prettier leaves a template with a line break beside the arrow or the parenthesis before it.
    node.quasi.quasis[0].value.raw += '\n';
  }
  for (const [name, value] of Object.entries(node)) if (name !== 'comments' && name !== 'tokens') markTemplates(value);
}

export const parsers = {
  babel: {
    ...babel.parsers.babel,
    async parse(/** @type {string} */ text, /** @type {any} */ options) {
      const tree = await babel.parsers.babel.parse(text, options);
      markTemplates(tree.program);
      return tree;
    },
  },
};

export const printers = { estree: { ...basePrinter, embed } };
