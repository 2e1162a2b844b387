import assert from 'node:assert/strict';
import { test } from 'node:test';

import { contentOf, isElement, isText, parseTemplate } from '../../../../app/web/htm_template.js';
import { html } from '../../../../app/web/static/vendor/preact.js';

const TEMPLATES = [
  ['<p>a text</p>'],
  ['<p> spaces at the border </p>'],
  ['<p>\n  a text\n  of two lines\n</p>'],
  ['<p>a <b>bold</b> <i>word</i>, and\n  <code>code</code>\n  after it</p>'],
  ['<p>', ' of ', '</p>'],
  ['<p>\n  ', '\n  ', ' and ', '\n</p>'],
  ['<input type="text" disabled value=', ' title="from ', ' to ', '" />'],
  ['<', ' name=', ' /><', ' ...', '>child<//>'],
  ['<a href="/">one</a>\n<a href="/two">two</a>text'],
  ['<ul>', '</ul><hr/>', ''],
  ['<p>\u00a0fixed\u00a0</p>'],
];

/** Children as htm hands them to Preact; the value of each expression is its index. */
const readByHtm = (statics) => {
  const values = statics.slice(1).map((_text, index) => (statics[index].endsWith('...') ? { spread: index } : index));
  return [html(Object.assign([...statics], { raw: statics }), ...values)].flat().map(plain);
};

const plain = (child) => {
  if (child === null || typeof child !== 'object') return child;
  const { children = [], ...attributes } = child.props;
  return { tag: child.type, attributes, children: [children].flat().map(plain) };
};

/** The same from what the formatter reads. */
const readByFormatter = (children) =>
  children.map((child) => {
    if (isText(child)) return child.text;
    if (!isElement(child)) return child;
    const attributes = child.attributes.map(({ name, value }) => {
      if (name === '...') return ['spread', value[0]];
      return [name, value === null ? true : value.length === 1 ? value[0] : value.join('')];
    });
    const [tag] = child.tag;
    return { tag, attributes: Object.fromEntries(attributes), children: readByFormatter(child.children) };
  });

test('the formatter reads templates as htm does', () => {
  for (const statics of TEMPLATES) {
    assert.deepEqual(readByFormatter(parseTemplate(statics)), readByHtm(statics), statics.join('${}'));
  }
});

test('a template that is not complete is an error', () => {
  for (const text of ['<p>text', 'text</p>', '<p class="a"', '<p><b>text</p>']) {
    assert.throws(() => parseTemplate([text]), SyntaxError, text);
  }
});

test('a line break in a text is a space, and one at its border is nothing', () => {
  const content = (text) => contentOf(parseTemplate([text]));
  assert.equal(content('<p>\n  two\n  words\n</p>'), content('<p>two words</p>'));
  assert.notEqual(content('<p>two <b>words</b></p>'), content('<p>two\n<b>words</b></p>'));
});
