/* PASS_API marks what libpass shows; everything else of it is hidden. */
#ifndef PASS_EXPORT_H
#define PASS_EXPORT_H

#if defined(_WIN32) && !defined(PASS_STATIC)
#ifdef PASS_BUILDING
#define PASS_API __declspec(dllexport)
#else
#define PASS_API __declspec(dllimport)
#endif
#elif defined(_WIN32)
#define PASS_API
#else
#define PASS_API __attribute__((visibility("default")))
#endif

#endif
