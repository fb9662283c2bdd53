/** What `page.py` writes before the first file: texts by language and key, and the acceptable error of each task. */
declare const KNOWN: { texts: Record<string, Record<string, string>>; tasks: Record<string, number> };
