; attnproof gcn fixture 1 {"target": "gfx906", "kernels": [{"name": "small_attention", "vgprs": 59, "sgprs": 26, "vgpr_spills": 0, "sgpr_spills": 0, "lds_bytes": 5248, "scratch_bytes": 0, "kernarg_size": 56, "wavefront_size": 64, "max_flat_workgroup_size": 128, "arguments": [{".offset": 0, ".size": 56, ".value_kind": "by_value"}], "entry": 5632, "rsrc1": 11469006, "rsrc2": 396, "properties": 9}]}
Disassembly of section .text:

0000000000001600 <small_attention>:
	s_load_dwordx4 s[16:19], s[4:5], 0x28                      // 000000001600: C00A0402 00000028
	v_lshrrev_b32_e32 v17, 4, v0                               // 000000001608: 20220084
	v_lshl_or_b32 v25, s6, 3, v17                              // 00000000160C: D2000019 04450606
	v_mov_b32_e32 v18, 0                                       // 000000001614: 7E240280
	v_mov_b32_e32 v1, 0                                        // 000000001618: 7E020280
	s_waitcnt lgkmcnt(0)                                       // 00000000161C: BF8CC07F
	s_mul_hi_i32 s21, s16, s7                                  // 000000001620: 96950710
	s_mul_i32 s20, s16, s7                                     // 000000001624: 92140710
	v_cmp_gt_i32_e32 vcc, s16, v25                             // 000000001628: 7D883210
	v_mov_b32_e32 v2, 0                                        // 00000000162C: 7E040280
	v_mov_b32_e32 v3, 0                                        // 000000001630: 7E060280
	v_mov_b32_e32 v4, 0                                        // 000000001634: 7E080280
	v_mov_b32_e32 v5, 0                                        // 000000001638: 7E0A0280
	v_mov_b32_e32 v6, 0                                        // 00000000163C: 7E0C0280
	v_mov_b32_e32 v7, 0                                        // 000000001640: 7E0E0280
	v_mov_b32_e32 v8, 0                                        // 000000001644: 7E100280
	v_mov_b32_e32 v9, 0                                        // 000000001648: 7E120280
	v_mov_b32_e32 v10, 0                                       // 00000000164C: 7E140280
	v_mov_b32_e32 v11, 0                                       // 000000001650: 7E160280
	v_mov_b32_e32 v12, 0                                       // 000000001654: 7E180280
	v_mov_b32_e32 v13, 0                                       // 000000001658: 7E1A0280
	v_mov_b32_e32 v14, 0                                       // 00000000165C: 7E1C0280
	v_mov_b32_e32 v15, 0                                       // 000000001660: 7E1E0280
	v_mov_b32_e32 v16, 0                                       // 000000001664: 7E200280
	s_and_saveexec_b64 s[2:3], vcc                             // 000000001668: BE82206A
	s_cbranch_execz 23                                         // 00000000166C: BF880017 <small_attention+0xcc>
	s_load_dwordx2 s[0:1], s[4:5], 0x0                         // 000000001670: C0060002 00000000
	v_lshlrev_b32_e32 v1, 5, v25                               // 000000001678: 24023285
	s_lshl_b64 s[8:9], s[20:21], 6                             // 00000000167C: 8E888614
	v_ashrrev_i32_e32 v2, 31, v1                               // 000000001680: 2204029F
	v_lshlrev_b64 v[1:2], 1, v[1:2]                            // 000000001684: D28F0001 00020281
	s_waitcnt lgkmcnt(0)                                       // 00000000168C: BF8CC07F
	s_add_u32 s0, s0, s8                                       // 000000001690: 80000800
	s_addc_u32 s1, s1, s9                                      // 000000001694: 82010901
	v_mov_b32_e32 v3, s1                                       // 000000001698: 7E060201
	v_add_co_u32_e64 v19, s[0:1], s0, v1                       // 00000000169C: D1190013 00020200
	v_addc_co_u32_e64 v20, s[0:1], v3, v2, s[0:1]              // 0000000016A4: D11C0014 00020503
	global_load_dwordx4 v[1:4], v[19:20], off offset:48        // 0000000016AC: DC5C8030 017F0013
	global_load_dwordx4 v[5:8], v[19:20], off offset:32        // 0000000016B4: DC5C8020 057F0013
	global_load_dwordx4 v[9:12], v[19:20], off offset:16       // 0000000016BC: DC5C8010 097F0013
	global_load_dwordx4 v[13:16], v[19:20], off                // 0000000016C4: DC5C8000 0D7F0013
	s_or_b64 exec, exec, s[2:3]                                // 0000000016CC: 87FE027E
	s_load_dwordx8 s[8:15], s[4:5], 0x8                        // 0000000016D0: C00E0202 00000008
	v_and_b32_e32 v26, 15, v0                                  // 0000000016D8: 2634008F
	s_cmp_lt_i32 s17, 1                                        // 0000000016DC: BF048111
	s_mov_b32 s6, 0                                            // 0000000016E0: BE860080
	s_cbranch_scc1 401                                         // 0000000016E4: BF850191 <small_attention+0x72c>
	s_mul_hi_i32 s1, s7, s17                                   // 0000000016E8: 96811107
	s_mul_i32 s0, s7, s17                                      // 0000000016EC: 92001107
	s_lshl_b64 s[0:1], s[0:1], 6                               // 0000000016F0: 8E808600
	s_waitcnt lgkmcnt(0)                                       // 0000000016F4: BF8CC07F
	s_add_u32 s2, s8, s0                                       // 0000000016F8: 80020008
	s_addc_u32 s3, s9, s1                                      // 0000000016FC: 82030109
	v_lshlrev_b32_e32 v18, 4, v0                               // 000000001700: 24240084
	s_add_u32 s4, s10, s0                                      // 000000001704: 8004000A
	v_and_b32_e32 v18, 48, v18                                 // 000000001708: 262424B0
	s_addc_u32 s5, s11, s1                                     // 00000000170C: 8205010B
	v_mov_b32_e32 v19, s3                                      // 000000001710: 7E260203
	v_add_co_u32_e64 v28, s[0:1], s2, v18                      // 000000001714: D119001C 00022402
	v_addc_co_u32_e64 v29, s[0:1], 0, v19, s[0:1]              // 00000000171C: D11C001D 00022680
	v_lshrrev_b32_e32 v27, 2, v0                               // 000000001724: 20360082
	s_movk_i32 s0, 0x50                                        // 000000001728: B0000050
	v_mad_u32_u24 v30, v27, s0, v18                            // 00000000172C: D1C3001E 0448011B
	v_lshrrev_b32_e32 v18, 3, v0                               // 000000001734: 20240083
	v_lshlrev_b32_e32 v0, 2, v0                                // 000000001738: 24000082
	v_and_b32_e32 v19, 28, v0                                  // 00000000173C: 2626009C
	v_lshlrev_b32_e32 v20, 1, v19                              // 000000001740: 24282681
	v_add_co_u32_e64 v31, s[0:1], s4, v20                      // 000000001744: D119001F 00022804
	v_subrev_u32_e32 v20, s16, v25                             // 00000000174C: 6C283210
	v_add_u32_e32 v33, s17, v20                                // 000000001750: 68422811
	v_mad_u32_u24 v20, v17, 40, v26                            // 000000001754: D1C30014 04695111
	v_mul_u32_u24_e32 v34, 0x50, v17                           // 00000000175C: 104422FF 00000050
	v_lshlrev_b32_e32 v17, 2, v19                              // 000000001764: 24222682
	v_lshl_or_b32 v17, v18, 7, v17                             // 000000001768: D2000011 04450F12
	v_mov_b32_e32 v21, s5                                      // 000000001770: 7E2A0205
	s_cmp_lg_u32 s18, 0                                        // 000000001774: BF078012
	v_add_u32_e32 v36, 0xa00, v17                              // 000000001778: 684822FF 00000A00
	v_mov_b32_e32 v17, 0x1200                                  // 000000001780: 7E2202FF 00001200
	v_lshlrev_b32_e32 v0, 1, v18                               // 000000001788: 24002481
	v_addc_co_u32_e64 v32, s[0:1], 0, v21, s[0:1]              // 00000000178C: D11C0020 00022A80
	s_cselect_b64 s[4:5], -1, 0                                // 000000001794: 858480C1
	v_lshlrev_b32_e32 v35, 3, v26                              // 000000001798: 24463483
	v_mul_u32_u24_e32 v37, 0x50, v26                           // 00000000179C: 104A34FF 00000050
	v_lshl_add_u32 v38, v20, 1, v17                            // 0000000017A4: D1FD0026 04450314
	v_lshlrev_b32_e32 v21, 6, v18                              // 0000000017AC: 242A2486
	v_lshlrev_b32_e32 v23, 5, v27                              // 0000000017B0: 242E3685
	v_mov_b32_e32 v39, 0xff800000                              // 0000000017B4: 7E4E02FF FF800000
	v_mov_b32_e32 v40, 0                                       // 0000000017BC: 7E500280
	v_mov_b32_e32 v24, 0                                       // 0000000017C0: 7E300280
	s_mov_b32 s7, 0x5040100                                    // 0000000017C4: BE8700FF 05040100
	s_mov_b32 s8, 0x7060302                                    // 0000000017CC: BE8800FF 07060302
	s_mov_b32 s9, 0xff800000                                   // 0000000017D4: BE8900FF FF800000
	v_mov_b32_e32 v43, 0xff800000                              // 0000000017DC: 7E5602FF FF800000
	v_mov_b32_e32 v41, 0                                       // 0000000017E4: 7E520280
	v_mov_b32_e32 v42, 0                                       // 0000000017E8: 7E540280
	v_add_u32_e32 v17, s6, v27                                 // 0000000017EC: 68223606
	v_cmp_gt_i32_e64 s[0:1], s17, v17                          // 0000000017F0: D0C40000 00022211
	v_mov_b32_e32 v17, 0                                       // 0000000017F8: 7E220280
	v_mov_b32_e32 v18, 0                                       // 0000000017FC: 7E240280
	v_mov_b32_e32 v19, 0                                       // 000000001800: 7E260280
	v_mov_b32_e32 v20, 0                                       // 000000001804: 7E280280
	s_waitcnt vmcnt(0)                                         // 000000001808: BF8C0F70
	s_barrier                                                  // 00000000180C: BF8A0000
	s_and_saveexec_b64 s[2:3], s[0:1]                          // 000000001810: BE822000
	s_cbranch_execz 8                                          // 000000001814: BF880008 <small_attention+0x238>
	v_lshlrev_b64 v[17:18], 1, v[23:24]                        // 000000001818: D28F0011 00022E81
	v_add_co_u32_e64 v17, s[0:1], v28, v17                     // 000000001820: D1190011 0002231C
	v_addc_co_u32_e64 v18, s[0:1], v29, v18, s[0:1]            // 000000001828: D11C0012 0002251D
	global_load_dwordx4 v[17:20], v[17:18], off                // 000000001830: DC5C8000 117F0011
	s_or_b64 exec, exec, s[2:3]                                // 000000001838: 87FE027E
	s_waitcnt vmcnt(0)                                         // 00000000183C: BF8C0F70
	ds_write_b128 v30, v[17:20]                                // 000000001840: D9BE0000 0000111E
	v_add_u32_e32 v20, s6, v0                                  // 000000001848: 68280006
	v_cmp_gt_i32_e64 s[0:1], s17, v20                          // 00000000184C: D0C40000 00022811
	v_mov_b32_e32 v19, 0                                       // 000000001854: 7E260280
	v_mov_b32_e32 v17, 0                                       // 000000001858: 7E220280
	v_mov_b32_e32 v18, 0                                       // 00000000185C: 7E240280
	s_and_saveexec_b64 s[2:3], s[0:1]                          // 000000001860: BE822000
	s_cbranch_execz 9                                          // 000000001864: BF880009 <small_attention+0x28c>
	v_mov_b32_e32 v22, v24                                     // 000000001868: 7E2C0318
	v_lshlrev_b64 v[17:18], 1, v[21:22]                        // 00000000186C: D28F0011 00022A81
	v_add_co_u32_e64 v17, s[0:1], v31, v17                     // 000000001874: D1190011 0002231F
	v_addc_co_u32_e64 v18, s[0:1], v32, v18, s[0:1]            // 00000000187C: D11C0012 00022520
	global_load_dwordx2 v[17:18], v[17:18], off                // 000000001884: DC548000 117F0011
	s_or_b64 exec, exec, s[2:3]                                // 00000000188C: 87FE027E
	v_add_u32_e32 v20, 1, v20                                  // 000000001890: 68282881
	v_cmp_gt_i32_e64 s[0:1], s17, v20                          // 000000001894: D0C40000 00022811
	v_mov_b32_e32 v20, 0                                       // 00000000189C: 7E280280
	s_and_saveexec_b64 s[2:3], s[0:1]                          // 0000000018A0: BE822000
	s_cbranch_execz 10                                         // 0000000018A4: BF88000A <small_attention+0x2d0>
	v_add_u32_e32 v19, 32, v21                                 // 0000000018A8: 68262AA0
	v_mov_b32_e32 v20, v24                                     // 0000000018AC: 7E280318
	v_lshlrev_b64 v[19:20], 1, v[19:20]                        // 0000000018B0: D28F0013 00022681
	v_add_co_u32_e64 v19, s[0:1], v31, v19                     // 0000000018B8: D1190013 0002271F
	v_addc_co_u32_e64 v20, s[0:1], v32, v20, s[0:1]            // 0000000018C0: D11C0014 00022920
	global_load_dwordx2 v[19:20], v[19:20], off                // 0000000018C8: DC548000 137F0013
	s_or_b64 exec, exec, s[2:3]                                // 0000000018D0: 87FE027E
	s_waitcnt vmcnt(0)                                         // 0000000018D4: BF8C0F70
	v_perm_b32 v44, v19, v17, s7                               // 0000000018D8: D1ED002C 001E2313
	v_perm_b32 v45, v19, v17, s8                               // 0000000018E0: D1ED002D 00222313
	v_perm_b32 v46, v20, v18, s7                               // 0000000018E8: D1ED002E 001E2514
	v_perm_b32 v47, v20, v18, s8                               // 0000000018F0: D1ED002F 00222514
	ds_write_b128 v36, v[44:47]                                // 0000000018F8: D9BE0000 00002C24
	s_waitcnt lgkmcnt(0)                                       // 000000001900: BF8CC07F
	s_barrier                                                  // 000000001904: BF8A0000
	ds_read_b128 v[17:20], v37                                 // 000000001908: D9FE0000 11000025
	ds_read_b128 v[44:47], v37 offset:16                       // 000000001910: D9FE0010 2C000025
	v_add_u32_e32 v22, s6, v26                                 // 000000001918: 682C3406
	v_cmp_gt_i32_e64 s[2:3], v22, v33                          // 00000000191C: D0C40002 00024316
	v_cmp_le_i32_e64 s[0:1], s17, v22                          // 000000001924: D0C30000 00022C11
	s_waitcnt lgkmcnt(1)                                       // 00000000192C: BF8CC17F
	v_dot2_f32_f16 v17, v13, v17, 0                            // 000000001930: D3A34011 1A02230D
	v_dot2_f32_f16 v17, v14, v18, v17                          // 000000001938: D3A34011 1C46250E
	v_dot2_f32_f16 v17, v15, v19, v17                          // 000000001940: D3A34011 1C46270F
	v_dot2_f32_f16 v17, v16, v20, v17                          // 000000001948: D3A34011 1C462910
	s_waitcnt lgkmcnt(0)                                       // 000000001950: BF8CC07F
	v_dot2_f32_f16 v44, v9, v44, v17                           // 000000001954: D3A3402C 1C465909
	ds_read_b128 v[17:20], v37 offset:32                       // 00000000195C: D9FE0020 11000025
	v_dot2_f32_f16 v44, v10, v45, v44                          // 000000001964: D3A3402C 1CB25B0A
	v_dot2_f32_f16 v44, v11, v46, v44                          // 00000000196C: D3A3402C 1CB25D0B
	v_dot2_f32_f16 v48, v12, v47, v44                          // 000000001974: D3A34030 1CB25F0C
	ds_read_b128 v[44:47], v37 offset:48                       // 00000000197C: D9FE0030 2C000025
	s_waitcnt lgkmcnt(1)                                       // 000000001984: BF8CC17F
	v_dot2_f32_f16 v17, v5, v17, v48                           // 000000001988: D3A34011 1CC22305
	v_dot2_f32_f16 v17, v6, v18, v17                           // 000000001990: D3A34011 1C462506
	v_dot2_f32_f16 v17, v7, v19, v17                           // 000000001998: D3A34011 1C462707
	v_dot2_f32_f16 v17, v8, v20, v17                           // 0000000019A0: D3A34011 1C462908
	s_waitcnt lgkmcnt(0)                                       // 0000000019A8: BF8CC07F
	v_dot2_f32_f16 v17, v1, v44, v17                           // 0000000019AC: D3A34011 1C465901
	v_dot2_f32_f16 v17, v2, v45, v17                           // 0000000019B4: D3A34011 1C465B02
	v_dot2_f32_f16 v17, v3, v46, v17                           // 0000000019BC: D3A34011 1C465D03
	v_dot2_f32_f16 v44, v4, v47, v17                           // 0000000019C4: D3A3402C 1C465F04
	ds_read_b128 v[17:20], v37 offset:1280                     // 0000000019CC: D9FE0500 11000025
	s_and_b64 s[2:3], s[4:5], s[2:3]                           // 0000000019D4: 86820204
	v_mul_f32_e32 v44, s19, v44                                // 0000000019D8: 0A585813
	s_or_b64 s[0:1], s[0:1], s[2:3]                            // 0000000019DC: 87800200
	v_cndmask_b32_e64 v48, v44, v39, s[0:1]                    // 0000000019E0: D1000030 00024F2C
	ds_read_b128 v[44:47], v37 offset:1296                     // 0000000019E8: D9FE0510 2C000025
	s_waitcnt lgkmcnt(1)                                       // 0000000019F0: BF8CC17F
	v_dot2_f32_f16 v17, v13, v17, 0                            // 0000000019F4: D3A34011 1A02230D
	v_dot2_f32_f16 v17, v14, v18, v17                          // 0000000019FC: D3A34011 1C46250E
	v_dot2_f32_f16 v17, v15, v19, v17                          // 000000001A04: D3A34011 1C46270F
	v_dot2_f32_f16 v17, v16, v20, v17                          // 000000001A0C: D3A34011 1C462910
	s_waitcnt lgkmcnt(0)                                       // 000000001A14: BF8CC07F
	v_dot2_f32_f16 v44, v9, v44, v17                           // 000000001A18: D3A3402C 1C465909
	ds_read_b128 v[17:20], v37 offset:1312                     // 000000001A20: D9FE0520 11000025
	v_dot2_f32_f16 v44, v10, v45, v44                          // 000000001A28: D3A3402C 1CB25B0A
	v_dot2_f32_f16 v44, v11, v46, v44                          // 000000001A30: D3A3402C 1CB25D0B
	v_dot2_f32_f16 v49, v12, v47, v44                          // 000000001A38: D3A34031 1CB25F0C
	ds_read_b128 v[44:47], v37 offset:1328                     // 000000001A40: D9FE0530 2C000025
	s_waitcnt lgkmcnt(1)                                       // 000000001A48: BF8CC17F
	v_dot2_f32_f16 v17, v5, v17, v49                           // 000000001A4C: D3A34011 1CC62305
	v_dot2_f32_f16 v17, v6, v18, v17                           // 000000001A54: D3A34011 1C462506
	v_dot2_f32_f16 v17, v7, v19, v17                           // 000000001A5C: D3A34011 1C462707
	v_dot2_f32_f16 v17, v8, v20, v17                           // 000000001A64: D3A34011 1C462908
	s_waitcnt lgkmcnt(0)                                       // 000000001A6C: BF8CC07F
	v_dot2_f32_f16 v17, v1, v44, v17                           // 000000001A70: D3A34011 1C465901
	v_dot2_f32_f16 v17, v2, v45, v17                           // 000000001A78: D3A34011 1C465B02
	v_add_u32_e32 v18, 16, v22                                 // 000000001A80: 68242C90
	v_dot2_f32_f16 v17, v3, v46, v17                           // 000000001A84: D3A34011 1C465D03
	v_cmp_gt_i32_e64 s[2:3], v18, v33                          // 000000001A8C: D0C40002 00024312
	v_dot2_f32_f16 v17, v4, v47, v17                           // 000000001A94: D3A34011 1C465F04
	v_cmp_le_i32_e64 s[0:1], s17, v18                          // 000000001A9C: D0C30000 00022411
	s_and_b64 s[2:3], s[4:5], s[2:3]                           // 000000001AA4: 86820204
	v_mul_f32_e32 v17, s19, v17                                // 000000001AA8: 0A222213
	s_or_b64 s[0:1], s[0:1], s[2:3]                            // 000000001AAC: 87800200
	v_cndmask_b32_e64 v18, v17, v39, s[0:1]                    // 000000001AB0: D1000012 00024F11
	v_max_f32_e32 v17, v48, v18                                // 000000001AB8: 16222530
	s_add_i32 s6, s6, 32                                       // 000000001ABC: 8106A006
	v_add_u32_e32 v21, 0x400, v21                              // 000000001AC0: 682A2AFF 00000400
	v_mov_b32_dpp v19, v17 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001AC8: 7E2602FA FF08B111
	v_max_f32_e32 v19, v19, v19                                // 000000001AD0: 16262713
	v_max_f32_e32 v17, v17, v19                                // 000000001AD4: 16222711
	s_cmp_ge_i32 s6, s17                                       // 000000001AD8: BF031106
	v_add_u32_e32 v23, 0x400, v23                              // 000000001ADC: 682E2EFF 00000400
	v_mov_b32_dpp v19, v17 quad_perm:[2,3,0,1] row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001AE4: 7E2602FA FF084E11
	v_max_f32_e32 v19, v19, v19                                // 000000001AEC: 16262713
	v_max_f32_e32 v17, v17, v19                                // 000000001AF0: 16222711
	s_nop 1                                                    // 000000001AF4: BF800001
	v_mov_b32_dpp v19, v17 row_half_mirror row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001AF8: 7E2602FA FF094111
	v_max_f32_e32 v19, v19, v19                                // 000000001B00: 16262713
	v_max_f32_e32 v17, v17, v19                                // 000000001B04: 16222711
	s_nop 1                                                    // 000000001B08: BF800001
	v_mov_b32_dpp v19, v17 row_mirror row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001B0C: 7E2602FA FF094011
	v_max3_f32 v17, v43, v17, v19                              // 000000001B14: D1D30011 044E232B
	v_cmp_neq_f32_e64 s[0:1], s9, v17                          // 000000001B1C: D04D0000 00022209
	v_cndmask_b32_e64 v19, 0, v17, s[0:1]                      // 000000001B24: D1000013 00022280
	v_sub_f32_e32 v20, v48, v19                                // 000000001B2C: 04282730
	v_exp_f32_e32 v20, v20                                     // 000000001B30: 7E284114
	v_sub_f32_e32 v18, v18, v19                                // 000000001B34: 04242712
	v_exp_f32_e32 v18, v18                                     // 000000001B38: 7E244112
	v_sub_f32_e32 v19, v43, v19                                // 000000001B3C: 0426272B
	v_cvt_f16_f32_e32 v22, v20                                 // 000000001B40: 7E2C1514
	v_exp_f32_e32 v19, v19                                     // 000000001B44: 7E264113
	v_cvt_f16_f32_e32 v44, v18                                 // 000000001B48: 7E581512
	ds_write_b16 v38, v22                                      // 000000001B4C: D83E0000 00001626
	ds_write_b16 v38, v44 offset:32                            // 000000001B54: D83E0020 00002C26
	v_add_u32_e32 v22, 0x800, v35                              // 000000001B5C: 682C46FF 00000800
	ds_read2_b64 v[43:46], v22 offset0:64 offset1:80           // 000000001B64: D8EE5040 2B000016
	ds_read_b128 v[47:50], v34 offset:4608                     // 000000001B6C: D9FE1200 2F000022
	ds_read_b128 v[51:54], v34 offset:4624                     // 000000001B74: D9FE1210 33000022
	ds_read2_b64 v[55:58], v22 offset0:96 offset1:112          // 000000001B7C: D8EE7060 37000016
	v_mul_f32_e32 v41, v41, v19                                // 000000001B84: 0A522729
	v_mul_f32_e32 v42, v42, v19                                // 000000001B88: 0A54272A
	v_add_f32_e32 v18, v20, v18                                // 000000001B8C: 02242514
	s_waitcnt lgkmcnt(2)                                       // 000000001B90: BF8CC27F
	v_dot2_f32_f16 v41, v47, v43, v41                          // 000000001B94: D3A34029 1CA6572F
	v_dot2_f32_f16 v42, v47, v44, v42                          // 000000001B9C: D3A3402A 1CAA592F
	v_dot2_f32_f16 v41, v48, v45, v41                          // 000000001BA4: D3A34029 1CA65B30
	v_dot2_f32_f16 v45, v48, v46, v42                          // 000000001BAC: D3A3402D 1CAA5D30
	s_waitcnt lgkmcnt(0)                                       // 000000001BB4: BF8CC07F
	v_dot2_f32_f16 v46, v49, v55, v41                          // 000000001BB8: D3A3402E 1CA66F31
	ds_read2_b64 v[41:44], v22 offset0:128 offset1:144         // 000000001BC0: D8EE9080 29000016
	v_dot2_f32_f16 v45, v49, v56, v45                          // 000000001BC8: D3A3402D 1CB67131
	v_dot2_f32_f16 v49, v50, v57, v46                          // 000000001BD0: D3A34031 1CBA7332
	v_dot2_f32_f16 v50, v50, v58, v45                          // 000000001BD8: D3A34032 1CB67532
	ds_read2_b64 v[45:48], v22 offset0:160 offset1:176         // 000000001BE0: D8EEB0A0 2D000016
	s_waitcnt lgkmcnt(1)                                       // 000000001BE8: BF8CC17F
	v_dot2_f32_f16 v41, v51, v41, v49                          // 000000001BEC: D3A34029 1CC65333
	v_dot2_f32_f16 v42, v51, v42, v50                          // 000000001BF4: D3A3402A 1CCA5533
	v_dot2_f32_f16 v41, v52, v43, v41                          // 000000001BFC: D3A34029 1CA65734
	v_dot2_f32_f16 v42, v52, v44, v42                          // 000000001C04: D3A3402A 1CAA5934
	s_waitcnt lgkmcnt(0)                                       // 000000001C0C: BF8CC07F
	v_dot2_f32_f16 v45, v53, v45, v41                          // 000000001C10: D3A3402D 1CA65B35
	v_dot2_f32_f16 v46, v53, v46, v42                          // 000000001C18: D3A3402E 1CAA5D35
	ds_read2_b64 v[41:44], v22 offset0:192 offset1:208         // 000000001C20: D8EED0C0 29000016
	ds_read_b128 v[49:52], v34 offset:4640                     // 000000001C28: D9FE1220 31000022
	v_dot2_f32_f16 v57, v54, v47, v45                          // 000000001C30: D3A34039 1CB65F36
	v_dot2_f32_f16 v58, v54, v48, v46                          // 000000001C38: D3A3403A 1CBA6136
	ds_read_b128 v[45:48], v34 offset:4656                     // 000000001C40: D9FE1230 2D000022
	ds_read2_b64 v[53:56], v22 offset0:224 offset1:240         // 000000001C48: D8EEF0E0 35000016
	v_add_f32_dpp v18, v18, v18 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001C50: 022424FA FF08B112
	s_waitcnt lgkmcnt(2)                                       // 000000001C58: BF8CC27F
	v_dot2_f32_f16 v22, v49, v41, v57                          // 000000001C5C: D3A34016 1CE65331
	v_dot2_f32_f16 v41, v49, v42, v58                          // 000000001C64: D3A34029 1CEA5531
	v_dot2_f32_f16 v22, v50, v43, v22                          // 000000001C6C: D3A34016 1C5A5732
	v_dot2_f32_f16 v49, v50, v44, v41                          // 000000001C74: D3A34031 1CA65932
	v_add_u32_e32 v50, 0x1000, v35                             // 000000001C7C: 686446FF 00001000
	ds_read2_b64 v[41:44], v50 offset1:16                      // 000000001C84: D8EE1000 29000032
	s_waitcnt lgkmcnt(1)                                       // 000000001C8C: BF8CC17F
	v_dot2_f32_f16 v22, v51, v53, v22                          // 000000001C90: D3A34016 1C5A6B33
	v_dot2_f32_f16 v49, v51, v54, v49                          // 000000001C98: D3A34031 1CC66D33
	v_dot2_f32_f16 v22, v52, v55, v22                          // 000000001CA0: D3A34016 1C5A6F34
	v_dot2_f32_f16 v49, v52, v56, v49                          // 000000001CA8: D3A34031 1CC67134
	s_waitcnt lgkmcnt(0)                                       // 000000001CB0: BF8CC07F
	v_dot2_f32_f16 v20, v45, v41, v22                          // 000000001CB4: D3A34014 1C5A532D
	v_dot2_f32_f16 v22, v45, v42, v49                          // 000000001CBC: D3A34016 1CC6552D
	v_dot2_f32_f16 v20, v46, v43, v20                          // 000000001CC4: D3A34014 1C52572E
	v_dot2_f32_f16 v22, v46, v44, v22                          // 000000001CCC: D3A34016 1C5A592E
	ds_read2_b64 v[41:44], v50 offset0:32 offset1:48           // 000000001CD4: D8EE3020 29000032
	v_add_f32_dpp v18, v18, v18 quad_perm:[2,3,0,1] row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001CDC: 022424FA FF084E12
	s_waitcnt lgkmcnt(0)                                       // 000000001CE4: BF8CC07F
	v_dot2_f32_f16 v20, v47, v41, v20                          // 000000001CE8: D3A34014 1C52532F
	v_add_f32_dpp v18, v18, v18 row_half_mirror row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001CF0: 022424FA FF094112
	v_dot2_f32_f16 v22, v47, v42, v22                          // 000000001CF8: D3A34016 1C5A552F
	v_dot2_f32_f16 v41, v48, v43, v20                          // 000000001D00: D3A34029 1C525730
	v_add_f32_dpp v18, v18, v18 row_mirror row_mask:0xf bank_mask:0xf bound_ctrl:1// 000000001D08: 022424FA FF094012
	v_dot2_f32_f16 v42, v48, v44, v22                          // 000000001D10: D3A3402A 1C5A5930
	v_fmac_f32_e32 v18, v40, v19                               // 000000001D18: 76242728
	s_cbranch_scc1 7                                           // 000000001D1C: BF850007 <small_attention+0x73c>
	v_mov_b32_e32 v43, v17                                     // 000000001D20: 7E560311
	v_mov_b32_e32 v40, v18                                     // 000000001D24: 7E500312
	s_branch 65200                                             // 000000001D28: BF82FEB0 <small_attention+0x1ec>
	v_mov_b32_e32 v17, 0xff800000                              // 000000001D2C: 7E2202FF FF800000
	v_mov_b32_e32 v41, 0                                       // 000000001D34: 7E520280
	v_mov_b32_e32 v42, 0                                       // 000000001D38: 7E540280
	s_and_saveexec_b64 s[0:1], vcc                             // 000000001D3C: BE80206A
	s_cbranch_execz 49                                         // 000000001D40: BF880031 <small_attention+0x808>
	v_rcp_f32_e32 v0, v18                                      // 000000001D44: 7E004512
	v_cmp_lt_f32_e32 vcc, 0, v18                               // 000000001D48: 7C822480
	s_waitcnt vmcnt(3)                                         // 000000001D4C: BF8C0F73
	v_ashrrev_i32_e32 v1, 31, v25                              // 000000001D50: 2202329F
	v_mov_b32_e32 v2, s21                                      // 000000001D54: 7E040215
	v_cndmask_b32_e32 v0, 0, v0, vcc                           // 000000001D58: 00000080
	v_fma_mixlo_f16 v4, v41, v0, 0                             // 000000001D5C: D3A10004 02020129
	v_fma_mixhi_f16 v4, v42, v0, 0                             // 000000001D64: D3A20004 0202012A
	v_add_co_u32_e64 v0, s[0:1], s20, v25                      // 000000001D6C: D1190000 00023214
	v_addc_co_u32_e64 v1, s[0:1], v2, v1, s[0:1]               // 000000001D74: D11C0001 00020302
	v_lshlrev_b64 v[2:3], 6, v[0:1]                            // 000000001D7C: D28F0002 00020086
	s_waitcnt vmcnt(2) lgkmcnt(0)                              // 000000001D84: BF8C0072
	v_mov_b32_e32 v5, s13                                      // 000000001D88: 7E0A020D
	v_add_co_u32_e64 v2, s[0:1], s12, v2                       // 000000001D8C: D1190002 0002040C
	v_addc_co_u32_e64 v3, s[0:1], v5, v3, s[0:1]               // 000000001D94: D11C0003 00020705
	v_lshlrev_b32_e32 v5, 2, v26                               // 000000001D9C: 240A3482
	v_add_co_u32_e64 v2, s[0:1], v2, v5                        // 000000001DA0: D1190002 00020B02
	v_addc_co_u32_e64 v3, s[0:1], 0, v3, s[0:1]                // 000000001DA8: D11C0003 00020680
	v_cmp_eq_u32_e64 s[0:1], 0, v26                            // 000000001DB0: D0CA0000 00023480
	global_store_dword v[2:3], v4, off                         // 000000001DB8: DC708000 007F0402
	s_and_b64 exec, exec, s[0:1]                               // 000000001DC0: 86FE007E
	s_cbranch_execz 16                                         // 000000001DC4: BF880010 <small_attention+0x808>
	v_log_f32_e32 v3, v18                                      // 000000001DC8: 7E064312
	v_lshlrev_b64 v[0:1], 2, v[0:1]                            // 000000001DCC: D28F0000 00020082
	v_mov_b32_e32 v2, s15                                      // 000000001DD4: 7E04020F
	v_add_co_u32_e64 v0, s[0:1], s14, v0                       // 000000001DD8: D1190000 0002000E
	v_addc_co_u32_e64 v1, s[0:1], v2, v1, s[0:1]               // 000000001DE0: D11C0001 00020302
	v_add_f32_e32 v2, v17, v3                                  // 000000001DE8: 02040711
	v_mul_f32_e32 v2, 0x3f317218, v2                           // 000000001DEC: 0A0404FF 3F317218
	v_mov_b32_e32 v3, 0xff800000                               // 000000001DF4: 7E0602FF FF800000
	v_cndmask_b32_e32 v2, v3, v2, vcc                          // 000000001DFC: 00040503
	global_store_dword v[0:1], v2, off                         // 000000001E00: DC708000 007F0200
	s_endpgm                                                   // 000000001E08: BF810000
