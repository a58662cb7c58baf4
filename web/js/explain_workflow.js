/** Explain this workflow: says what Run on several GPUs would do with each loader of a diffusion model, and changes nothing. */
import { grouped, look, NO_LOADER, say } from "./loaders.js";
import { size } from "./size.js";

export const EXPLAIN = "ParallelDiT.ExplainWorkflow";
export const EXPLAIN_TITLE = "Explain this workflow";
const SECONDS = 60; // to read it

/** What would become of a loader. */
function said({ name, weights, pipefusion }, cards) {
    const where = cards.map((card) => `${card.name} (${size(card.memory)})`).join(", ");
    const exact = "every step equals that of one GPU";
    const banded =
        `Apply PipeFusion would be added too, because ${pipefusion}: its first step is exact, and the others are close. ` +
        "warmup_steps makes more of them exact";
    const how = pipefusion ? banded : exact;
    return `${name}: ${size(weights)} of weights on ${where}. Parallelize Model would split each image over the GPUs; ${how}.`;
}

export async function explain() {
    const found = await look();
    if (!found) return say(EXPLAIN_TITLE, "warn", NO_LOADER);
    const { decided, idle, answer } = found;
    if (answer.why) return say(EXPLAIN_TITLE, "warn", answer.why);
    for (const each of decided.filter(({ takes }) => takes)) say(EXPLAIN_TITLE, "info", said(each, answer.cards), SECONDS);
    const already = decided.filter(({ parallel }) => parallel);
    if (already.length) {
        const names = already.map(({ name }) => name).join("; ");
        say(EXPLAIN_TITLE, "info", `On several GPUs already: ${names}.`, SECONDS);
    }
    for (const [why, names] of grouped([...decided.filter(({ takes, parallel }) => !takes && !parallel), ...idle], "why")) {
        say(EXPLAIN_TITLE, "info", `Would not be changed: ${names}: ${why.replace(/\.$/, "")}.`, SECONDS);
    }
}
