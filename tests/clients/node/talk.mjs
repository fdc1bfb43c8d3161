// Has a conversation of two turns through the AI SDK's own provider, which speaks OpenAI's responses; prints JSON.
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, streamText } from 'ai';

const [baseURL, name, question, more] = process.argv.slice(2);
const sent = [];
const openai = createOpenAI({
  baseURL,
  apiKey: 'none',
  fetch: (url, init) => {
    sent.push(JSON.parse(init.body));
    return fetch(url, init);
  },
});
const options = { model: openai.responses(name), temperature: 0, maxOutputTokens: 12 };

const first = await generateText({ ...options, prompt: question });
const messages = [
  { role: 'user', content: question },
  ...first.response.messages,
  { role: 'user', content: more },
];
let second = '';
for await (const part of streamText({ ...options, messages }).textStream) second += part;
console.log(JSON.stringify({ first: first.text, second, kinds: sent[1].input.map((item) => item.type) }));
