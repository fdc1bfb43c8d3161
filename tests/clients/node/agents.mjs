// Has a conversation of three turns through @openai/agents, in both of OpenAI's APIs; prints JSON.
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled } from '@openai/agents';
import OpenAI from 'openai';

const [baseURL, name, question, more] = process.argv.slice(2);
setTracingDisabled(true);
const ignored = new Set();
const client = new OpenAI({
  baseURL,
  apiKey: 'none',
  maxRetries: 0,
  fetch: async (url, init) => {
    const answer = await fetch(url, init);
    for (const path of (answer.headers.get('x-octavo-ignored') ?? '').split(', ')) if (path) ignored.add(path);
    return answer;
  },
});
const modelSettings = { temperature: 0, maxTokens: 12, store: true };
const found = {};
for (const [api, Model] of [['chat', OpenAIChatCompletionsModel], ['responses', OpenAIResponsesModel]]) {
  const agent = new Agent({ name: 'Geographer', instructions: 'Be brief.', model: new Model(client, name), modelSettings });
  const first = await run(agent, question);
  const second = await run(agent, [...first.history, { role: 'user', content: more }]);
  const streamed = await run(agent, [...second.history, { role: 'user', content: more }], { stream: true });
  await streamed.completed;
  found[api] = { first: first.finalOutput, second: second.finalOutput, third: streamed.finalOutput };
}
console.log(JSON.stringify({ ...found, ignored: [...ignored] }));
