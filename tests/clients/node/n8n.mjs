// Asks the server as n8n's chat model nodes do, through LangChain.js: both of OpenAI's APIs, a tool, Ollama; prints JSON.
import { ChatOllama } from '@langchain/ollama';
import { ChatOpenAI } from '@langchain/openai';

const [baseURL, name, prompt] = process.argv.slice(2);
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const weather = { type: 'function', function: { name: 'get_weather', description: 'Weather of a city', parameters } };
const found = {};
for (const useResponsesApi of [false, true]) {
  const model = new ChatOpenAI({
    apiKey: 'none', model: name, temperature: 0, maxTokens: 12, maxRetries: 0, useResponsesApi, configuration: { baseURL },
  });
  const whole = await model.invoke(prompt);
  let streamed = '';
  for await (const chunk of await model.stream(prompt)) streamed += chunk.text;
  const call = await new ChatOpenAI({
    apiKey: 'none', model: name, temperature: 0, maxTokens: 60, useResponsesApi, configuration: { baseURL },
  }).bindTools([weather], { tool_choice: 'get_weather' }).invoke('What is the weather in Oslo?');
  found[useResponsesApi ? 'responses' : 'chat'] = {
    whole: whole.text, streamed, call: call.tool_calls[0], usage: whole.usage_metadata.output_tokens,
  };
}
const ollama = new ChatOllama({ baseUrl: baseURL.replace(/\/v1$/, ''), model: name, temperature: 0, numPredict: 12 });
found.ollama = (await ollama.invoke(prompt)).text;
const models = await (await fetch(`${baseURL}/models`)).json();
console.log(JSON.stringify({ ...found, models: models.data.map((model) => model.id) }));
