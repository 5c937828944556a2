/* PASS_API marks the symbols that libpass exports; all others are hidden. */
#ifndef PASS_EXPORT_H
#define PASS_EXPORT_H

#define PASS_API __attribute__((visibility("default")))

#endif
