/* PASS_API marks what libpass shows; everything else of it is hidden. */
#ifndef PASS_EXPORT_H
#define PASS_EXPORT_H

#define PASS_API __attribute__((visibility("default")))

#endif
