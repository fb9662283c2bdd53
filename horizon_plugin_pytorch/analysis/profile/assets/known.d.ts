/**
 * What `page.py` writes before the first file: texts by language and key, the acceptable error of each task, and for each
 * function of similarity beyond which threshold an operator is said to lose accuracy.
 */
declare const KNOWN: {
  texts: Record<string, Record<string, string>>;
  tasks: Record<string, number>;
  metrics: Record<string, { threshold: number; higher_is_better: boolean }>;
};
