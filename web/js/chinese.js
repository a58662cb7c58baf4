/** How the pack's English texts become Chinese, for an editor in Chinese. The texts are in chinese_lines.js and chinese_toasts.js. */

/**
 * The Chinese of a text by the first row of `table` that knows it, [pattern, words]: `$1` in the words is the pattern's first
 * group as it is, `{1}` is its Chinese by `inner`. The text itself if no row knows it.
 */
export function translated(text, table, inner = []) {
    const row = table.find(([pattern]) => pattern.test(text));
    if (!row) return text;
    const groups = row[0].exec(text);
    return row[1].replace(/\$(\d)|\{(\d)\}/g, (_, kept, other) => (kept ? groups[kept] : translated(groups[other] ?? "", inner, inner)));
}

/** Whether the editor's language is Chinese. `app`: ComfyUI's. */
export const isChinese = (app) =>
    String(app.ui.settings.getSettingValue("Comfy.Locale") ?? navigator.language).startsWith("zh");
