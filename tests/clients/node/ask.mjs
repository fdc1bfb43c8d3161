// Asks the server at the given URL through the Vercel AI SDK, whole and streamed; prints JSON.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';

const [baseURL, name, prompt] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: 'octavo', baseURL, includeUsage: true });
const options = { model: provider.chatModel(name), prompt, temperature: 0, maxOutputTokens: 12 };

const whole = await generateText(options);
let streamed = '';
const stream = streamText(options);
for await (const part of stream.textStream) streamed += part;

let refusal = '';
try {
  await generateText({ ...options, temperature: 5, maxRetries: 0 });
} catch (error) {
  refusal = `${error.statusCode} ${error.message}`;
}
const completed = await generateText({
  ...options, model: provider.completionModel(name), prompt: 'The capital of France is',
});
console.log(JSON.stringify({
  whole: whole.text,
  streamed,
  completed: completed.text,
  usage: await stream.usage,
  refusal,
}));
